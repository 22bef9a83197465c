"""Threads that call torch, which have to be out of it when the program ends.

The interpreter ends its daemon threads where they next ask for its lock. In torch, which lets go of
that lock even while a tensor is freed, they are then unwound through functions that no exception
may leave, and the whole process aborts.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable

# A thread in a collective may have to wait for a process that will never come.
_GRACE_SECONDS = 10.0

# Held weakly: what can be stopped is most often what holds the thread.
_stops: weakref.WeakKeyDictionary[threading.Thread, Callable[[], Callable[[], None] | None]] = (
    weakref.WeakKeyDictionary()
)


def start(
    run: Callable[[], None], name: str, stop: Callable[[], None] | None = None
) -> threading.Thread:
    """Start a thread that the end of the program waits for, some seconds at most.

    Args:
        run: what it does.
        name: of the thread.
        stop: a method that is called at the end of the program if the thread still runs, and makes
            it end soon; None for a thread that does so anyway. It does not keep its object alive.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    _stops[thread] = _nothing if stop is None else weakref.WeakMethod(stop)
    thread.start()
    return thread


def _nothing() -> None:
    return None


@atexit.register
def _end_all() -> None:
    running = [thread for thread in list(_stops) if thread.is_alive()]
    for thread in running:
        stop = _stops[thread]()
        if stop is not None:
            stop()
    end = time.monotonic() + _GRACE_SECONDS
    for thread in running:
        thread.join(max(0.0, end - time.monotonic()))
