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
        # Reentrant: the garbage collector may run a finalizer that tries the lock at any moment.
        self._guard = threading.RLock()
        self._is_taken = False
        self._waiting: deque[threading.Event] = deque()

    def __enter__(self) -> None:
        """Wait for the lock."""
        turn = threading.Event()
        with self._guard:
            if not self._is_taken:
                self._is_taken = True
                return
            self._waiting.append(turn)
        try:
            turn.wait()
        except BaseException:
            # Interrupted: the turn goes to the next one, if it has come in this moment.
            with self._guard:
                if turn.is_set():
                    self.release()
                else:
                    self._waiting.remove(turn)
            raise

    def __exit__(self, *_: object) -> None:
        """Hand the lock to who has waited longest."""
        self.release()

    def try_acquire(self) -> bool:
        """Take the lock if it is free; never waits."""
        with self._guard:
            if self._is_taken:
                return False
            self._is_taken = True
            return True

    def release(self) -> None:
        """Hand the lock to who has waited longest."""
        with self._guard:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._is_taken = False
