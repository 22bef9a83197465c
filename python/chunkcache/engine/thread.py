"""The thread in which an engine runs, for callers that must not wait."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from chunkcache.engine import background
from chunkcache.engine.core import Engine
from chunkcache.engine.executor import named
from chunkcache.engine.lockstep import LockstepEngine, Order
from chunkcache.engine.mailbox import Letter, Mailbox, letter_of, news_of, post
from chunkcache.engine.outputs import StreamOutput
from chunkcache.engine.sequence import Request
from chunkcache.errors import EngineError


class EngineThread:
    """Steps an engine while there is work, and brings the outputs to their mailboxes.

    What others want of the engine comes as commands, which run between two steps.
    """

    def __init__(
        self, engine: Engine | LockstepEngine, at_end: Callable[[], None] | None = None
    ) -> None:
        """Start the thread.

        Args:
            engine: what it runs.
            at_end: called in the thread, as the last thing.
        """
        self._engine = engine
        self._at_end = at_end
        self._active: dict[Mailbox, Request] = {}
        self._commands: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._changed = threading.Condition()
        # What those get who come after the end.
        self._stopped: Callable[[], EngineError] | None = None
        self._thread = background.start(self._run, "chunkcache-engine", self.stop_soon)

    def add(self, request: Request, mailbox: Mailbox) -> Future[None]:
        """Take a request in; its outputs go to ``mailbox``."""

        def command() -> None:
            self._engine.add([request])
            self._active[mailbox] = request

        return self._submit(command)

    def abort(self, mailbox: Mailbox) -> Future[None]:
        """End the request of ``mailbox``, if it has not ended; its outputs say "abort"."""

        def command() -> None:
            request = self._active.pop(mailbox, None)
            if request is None:
                return
            self._engine.abort([request])
            # Another thread's step may be in progress, which takes it out when it ends.
            with suppress(EngineError):
                self._engine.settle()
            post([(mailbox, _farewell(request, whole=mailbox.wants_whole))])

        return self._submit(command)

    def check_accounts(self) -> Future[None]:
        """Check that no chunk is lost; see `Engine.check_accounts`."""
        return self._submit(self._engine.check_accounts)

    def stop_soon(self) -> None:
        """End all requests and the thread. Stopping twice is stopping once."""
        self._submit(self._stop)

    def stop(self) -> None:
        """End all requests and the thread, and wait for it."""
        self.stop_soon()
        self._thread.join()

    def _submit(self, command: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        with self._changed:
            if self._stopped is None:
                self._commands.append((command, future))
                self._changed.notify()
            else:
                future.set_exception(self._stopped())
        return future

    def _run(self) -> None:
        try:
            while self._stopped is None:
                self._run_commands()
                if self._active and self._stopped is None:
                    self._step()
        except BaseException as error:
            # What happens here was not foreseen, so nothing that the engine holds can be trusted.
            self._end_all(f"the engine's thread failed: {named(error)}", error)
        finally:
            if self._at_end is not None:
                self._at_end()

    def _run_commands(self) -> None:
        with self._changed:
            while not self._commands and not self._active:
                self._changed.wait()
            commands = list(self._commands)
            self._commands.clear()
        for command, future in commands:
            # It runs even if who asked for it does not wait any more.
            is_awaited = future.set_running_or_notify_cancel()
            outcome: Exception | None = None
            try:
                if self._stopped is not None:
                    raise self._stopped()
                command()
            except Exception as error:
                outcome = error
            if is_awaited and outcome is None:
                future.set_result(None)
            elif is_awaited:
                future.set_exception(outcome)

    def _step(self) -> None:
        # Every request has its own error then, which the mailboxes get below.
        with suppress(EngineError):
            self._engine.step()
        letters: list[tuple[Mailbox, Letter]] = []
        for mailbox, request in list(self._active.items()):
            letter = news_of(request, whole=mailbox.wants_whole)
            if letter is None:
                continue
            letters.append((mailbox, letter))
            if letter.is_last:
                del self._active[mailbox]
        for mailbox in post(letters):
            if mailbox in self._active:
                self._engine.abort([self._active.pop(mailbox)])
        if not self._active:
            # What fails here is the next caller's to hear.
            with suppress(EngineError):
                self._engine.settle()

    def _stop(self) -> None:
        requests = list(self._active.values())
        self._end_all("the engine was shut down", None)
        self._engine.abort(requests)

    def _end_all(self, message: str, cause: BaseException | None) -> None:
        def failure() -> EngineError:
            error = EngineError(message)
            error.__cause__ = cause
            return error

        with self._changed:
            self._stopped = failure
            commands = list(self._commands)
            self._commands.clear()
        post((mailbox, Letter([], None, True, failure())) for mailbox in self._active)
        self._active.clear()
        for _, future in commands:
            if future.set_running_or_notify_cancel():
                future.set_exception(failure())


class FollowingThread:
    """Does in this process what the first one does with its engine.

    Attributes:
        ended: is done when that one has released its engine, or a process was lost.
    """

    def __init__(self, engine: LockstepEngine, make: Callable[[Order], Request]) -> None:
        """Start the thread; ``make`` makes a request of this process from one of the first."""
        self._engine = engine
        self._make = make
        self.ended: Future[None] = Future()
        background.start(self._run, "chunkcache-follower", self._leave)

    def _leave(self) -> None:
        self._engine.leave("its program ended before the first one's engine did")

    def _run(self) -> None:
        try:
            self._engine.follow(self._make)
        except BaseException as error:
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)


def _farewell(request: Request, *, whole: bool) -> Letter:
    """Return the last letter of a request that was aborted."""
    pieces = list(request.pieces)
    for sample in request.output.outputs:
        if sample.finish_reason is None:
            sample.finish_reason = "abort"
            pieces.append(
                StreamOutput(request.index, sample.index, "", [], "abort", request.output)
            )
    return letter_of(request, pieces, whole=whole, is_last=True)
