"""One engine over several processes, which make the same calls of it in the same order.

The first process tells the others of every call before it makes it. The others make the same call:
an `LLM` because their program does, which is compared with what they are told; an `AsyncLLM`
because they `follow`. So all plan the same steps, whatever comes in when.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeAlias

from chunkcache import ChunkCache
from chunkcache.engine.core import Engine
from chunkcache.engine.fair_lock import FairLock
from chunkcache.engine.params import SamplingParams
from chunkcache.engine.processes import Processes
from chunkcache.engine.prompts import TokenizedPrompt
from chunkcache.engine.sequence import Request
from chunkcache.engine.stats import EngineStats
from chunkcache.errors import EngineError


class Order(NamedTuple):
    """A request, as one process tells another of it; without what only picking depends on."""

    request_id: int | str
    place: int
    prompt: TokenizedPrompt
    params: SamplingParams
    max_tokens: int
    cache_salt: str
    priority: int
    lora: str | None

    @classmethod
    def of(cls, request: Request) -> Order:
        """Return the order for ``request``."""
        output = request.output
        return cls(
            output.request_id,
            request.index,
            TokenizedPrompt(output.prompt, request.prompt_token_ids),
            request.params,
            request.max_tokens,
            request.cache_salt,
            request.priority,
            request.lora,
        )


_Call: TypeAlias = tuple[str, Any]


class LockstepEngine:
    """An `Engine` whose calls are made in the other processes too.

    A process that is lost, or makes another call than the first one, ends it for all.
    """

    def __init__(self, engine: Engine, cache: ChunkCache, processes: Processes) -> None:
        """Run ``engine``, over ``cache``, together with those of the other processes."""
        self._engine = engine
        self._cache = cache
        self._processes = processes
        self._lock = FairLock()
        self._abandoned: deque[Request] = deque()
        # Where others may name them by their number.
        self._followed: dict[int, Request] = {}

    @property
    def is_first(self) -> bool:
        """Whether this process decides what the others do."""
        return self._processes.is_first

    @property
    def num_unfinished(self) -> int:
        """Return how many requests are waiting or running."""
        return self._engine.num_unfinished

    @property
    def stats(self) -> EngineStats:
        """What the engine of this process has done."""
        return self._engine.stats

    @stats.setter
    def stats(self, stats: EngineStats) -> None:
        self._engine.stats = stats

    def add(self, requests: Iterable[Request]) -> None:
        """Take requests in; see `Engine.add`.

        Raises:
            EngineError: a process is lost, or calls for other requests.
        """
        requests = list(requests)
        with self._exclusively():
            self._agree(("add", [Order.of(request) for request in requests]))
            self._engine.add(requests)

    def abort(self, requests: Iterable[Request]) -> None:
        """Take requests out; see `Engine.abort`. Never waits, and never fails."""
        self._abandoned.extend(requests)
        self._drop_abandoned()

    def step(self) -> list[Request]:
        """Plan a step and take in the tokens of another; see `Engine.step`."""
        with self._exclusively():
            self._agree(("step", self._where()))
            return self._engine.step()

    def settle(self) -> None:
        """Wait for a step in flight if no request is left; see `Engine.settle`."""
        with self._exclusively():
            self._agree(("settle", None))
            self._engine.settle()

    def check_accounts(self) -> None:
        """Check that no chunk is lost; see `Engine.check_accounts`."""
        with self._exclusively():
            self._agree(("check_accounts", None))
            self._engine.check_accounts()

    def release(self) -> None:
        """Let those that `follow` go."""
        with self._exclusively(), suppress(EngineError):
            self._agree(("release", None))

    def follow(self, make: Callable[[Order], Request]) -> None:
        """Make the calls of the first process until it releases this one.

        Args:
            make: makes a request from an order.

        Raises:
            EngineError: a process is lost.
        """
        with self._lock, self._processes.reporting("following"):
            while (call := self._next_call()) is not None:
                # The requests have got their errors, which the first process's callers see.
                with suppress(EngineError):
                    self._follow(*call, make)

    def leave(self, reason: str) -> None:
        """End the engine for all, since this process cannot go on; a `follow` in progress ends."""
        self._processes.fail(reason)

    def _next_call(self) -> _Call | None:
        try:
            call: _Call = self._processes.receive()
        except EngineError as error:
            self._engine.fail(str(error))
            self._processes.check()
            # The first process has forgotten its engine.
            return None
        return None if call[0] == "release" else call

    def _follow(self, name: str, value: Any, make: Callable[[Order], Request]) -> None:
        if name == "add":
            requests = [make(order) for order in value]
            self._engine.add(requests)
            kept = [each for each in self._followed.values() if not each.finished]
            self._followed = {request.number: request for request in [*kept, *requests]}
        elif name == "abort":
            self._engine.abort([self._followed.pop(n) for n in value if n in self._followed])
        elif name == "step":
            self._compare((name, value), (name, self._where()))
            self._engine.step()
        elif name == "settle":
            self._engine.settle()
        else:
            self._engine.check_accounts()

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        with self._lock:
            self._drop_all()
            try:
                yield
            finally:
                self._drop_all()
        # What was abandoned in this moment found the lock taken.
        self._drop_abandoned()

    def _drop_abandoned(self) -> None:
        while self._abandoned and self._lock.try_acquire():
            try:
                self._drop_all()
            finally:
                self._lock.release()

    def _drop_all(self) -> None:
        while self._abandoned:
            requests = list(self._abandoned)
            self._abandoned.clear()
            # Without the others it is ended all the same, and they are, too.
            with suppress(EngineError):
                self._agree(("abort", [request.number for request in requests]))
            self._engine.abort(requests)

    def _where(self) -> tuple[int, int, int]:
        """Return what shows whether the engines have done the same so far."""
        stats = self._cache.stats()
        return self._engine.num_unfinished, stats.num_free, stats.num_evictable

    def _agree(self, call: _Call) -> None:
        """Tell the others of a call; in those, check that it is the one that they are told of."""
        with self._failing():
            if self._processes.is_first:
                self._processes.announce(call)
            else:
                self._compare(self._processes.receive(), call)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """End all requests when a process is lost."""
        try:
            yield
        except EngineError as error:
            self._engine.fail(str(error))
            raise

    def _compare(self, told: _Call, own: _Call) -> None:
        if told != own:
            self._processes.fail(
                f"it does not make the first one's calls: {_difference(told, own)}"
            )
            self._processes.check()


def _difference(told: _Call, own: _Call) -> str:
    """Say where two calls differ."""
    if told[0] != own[0]:
        return f"{own[0]}, not {told[0]}"
    if own[0] != "add" or len(told[1]) != len(own[1]):
        return f"{own[0]} of {_size(own)}, not of {_size(told)}"
    for at, (theirs, ours) in enumerate(zip(told[1], own[1], strict=True)):
        their_values = {**theirs._asdict(), **vars(theirs.params)}
        our_values = {**ours._asdict(), **vars(ours.params)}
        del their_values["params"]
        for name, value in their_values.items():
            if our_values[name] != value:
                return f"{name} of request {at} is {our_values[name]!r}, not {value!r}"
    return "of other requests"


def _size(call: _Call) -> Any:
    return f"{len(call[1])} requests" if call[0] == "add" else call[1]
