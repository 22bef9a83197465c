"""A lock that is handed over in the order in which it was asked for."""

from __future__ import annotations

import threading
from collections import deque


class FairLock:
    """A lock for ``with``, not to be taken twice by one thread.

    A thread that steps an engine takes the engine's lock again right after giving it back. With an
    ordinary lock another thread that waits for it hardly ever gets it, and so cannot even add a
    request; this one goes to who has waited longest.
    """

    def __init__(self) -> None:
        """Start free."""
        self._guard = threading.Lock()
        self._is_taken = False
        self._owner: int | None = None
        self._waiting: deque[threading.Event] = deque()

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread has the lock."""
        return self._owner == threading.get_ident()

    def __enter__(self) -> None:
        """Wait for the lock."""
        self._wait()
        self._owner = threading.get_ident()

    def _wait(self) -> None:
        with self._guard:
            if not self._is_taken:
                self._is_taken = True
                return
            turn = threading.Event()
            self._waiting.append(turn)
        try:
            turn.wait()
        except BaseException:
            # Interrupted: the turn goes to the next one, if it has come in this moment.
            with self._guard:
                if turn.is_set():
                    self._hand_over()
                else:
                    self._waiting.remove(turn)
            raise

    def __exit__(self, *_: object) -> None:
        """Hand the lock to who has waited longest."""
        self._owner = None
        with self._guard:
            self._hand_over()

    def _hand_over(self) -> None:
        if self._waiting:
            self._waiting.popleft().set()
        else:
            self._is_taken = False
