"""What the processes of one engine tell each other beside the tensors of a step.

The first process has a connection to each of the others. What it does goes out over them; what goes
wrong in any process comes back, and from there to all. A process that ends closes its connections,
whatever the others are waiting for, so that they need not wait for the time-out of a collective.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import connection
from queue import SimpleQueue
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from chunkcache._arrays import described
from chunkcache.engine import background
from chunkcache.errors import EngineError, InvalidConfigError

FIRST = 0
"""Rank of the process that decides what all of them do."""

# A process that has nothing left to do may end while another one takes in its last results.
_GRACE_SECONDS = 1.0
_KEY_BYTES = 32
_MAX_PORT = 2**16 - 1

# Why a default group is of no use any more: a collective may be in progress in it for ever.
_broken: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

_Connection: TypeAlias = "connection.Connection[Any, Any]"


def start(size: int, device: torch.device) -> None:
    """Start torch.distributed as ``torchrun`` describes it, unless the program has done so.

    Args:
        size: number of processes that there are to be.
        device: where this one's part of the model will be.

    Raises:
        InvalidConfigError: there are more or fewer, or ``torchrun``'s variables are wrong.
    """
    started = dist.is_available() and dist.is_initialized()
    number = dist.get_world_size() if started else environment_int("WORLD_SIZE", 1, default=1)
    if number != size:
        raise InvalidConfigError(
            f"tensor_parallel_size is {size}, but there is a process group of {number}; start the "
            f"program as {size} processes: torchrun --nproc-per-node {size}"
        )
    if not started:
        environment_int("RANK", 0, size - 1)
        environment_int("LOCAL_RANK", 0, size - 1, default=0)
        environment_int("MASTER_PORT", 1, _MAX_PORT)
        if not os.environ.get("MASTER_ADDR"):
            raise _not_set("MASTER_ADDR", "a host")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not started:
        on_cuda = device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_cuda else "gloo", device_id=device if on_cuda else None
        )


def environment_int(name: str, low: int, high: int | None = None, *, default: Any = None) -> int:
    """Return a variable of the environment, as ``torchrun`` sets it.

    Args:
        name: of the variable.
        low: the least value that is allowed.
        high: the largest one, None if there is none.
        default: what it stands for where it is not set, None if it has to be.

    Raises:
        InvalidConfigError: it is not set, or is something else.
    """
    text = os.environ.get(name, default)
    allowed = f"an int of at least {low}" if high is None else f"an int from {low} to {high}"
    if text is None:
        raise _not_set(name, allowed)
    try:
        number = int(text)
    except ValueError:
        number = low - 1
    if number < low or (high is not None and number > high):
        raise InvalidConfigError(
            f"{name} in the environment is {described(text)}; allowed is {allowed}"
        )
    return number


def _not_set(name: str, allowed: str) -> InvalidConfigError:
    return InvalidConfigError(
        f"{name} is not set in the environment; allowed is {allowed}, as torchrun sets it"
    )


class Processes:
    """The processes of the default group, from the point of view of one of them.

    Attributes:
        rank: of this process.
        size: how many there are.
        is_first: whether this one decides.
    """

    def __init__(self, device: torch.device) -> None:
        """Connect the processes, each of which calls this.

        Args:
            device: where the default group takes tensors.

        Raises:
            EngineError: processes of this group were lost in the middle of their work.
        """
        group: Any = dist.group.WORLD
        if (reason := _broken.get(group)) is not None:
            raise EngineError(f"{reason}; the processes can only be started again, all of them")
        # The thread that listens may be the last to hold this object, and must not free torch's.
        self._group = weakref.ref(group)
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.is_first = self.rank == FIRST
        self._has_begun = False
        self._break_off: Callable[[], None] | None = None
        self._lost: str | None = None
        self._noticed = threading.Event()
        self._losing = threading.Lock()
        # The garbage collector may close this in the middle of a message of the same thread.
        self._sending = threading.RLock()
        self._has_left = False
        self._peers = self._connected(device)
        self._inboxes: dict[int, SimpleQueue[Any]] = {rank: SimpleQueue() for rank in self._peers}
        threading.Thread(target=self._listen, name="chunkcache-processes", daemon=True).start()

    def begin(self, break_off: Callable[[], None] | None) -> None:
        """Begin with what makes the processes wait for each other.

        Args:
            break_off: called when a process is lost, in a thread of its own, to end collectives
                that would wait for it; None where they end by themselves.
        """
        self._has_begun = True
        self._break_off = break_off

    def announce(self, message: Any) -> None:
        """Tell the other processes something; the first process does.

        Raises:
            EngineError: a process is lost.
        """
        self.check()
        for peer in self._peers.values():
            self._send(peer, ("news", message))

    def receive(self, rank: int = FIRST) -> Any:
        """Wait for what process ``rank`` tells next.

        Raises:
            EngineError: a process is lost, or has left.
        """
        self.check()
        message = self._inboxes[rank].get()
        if message is None:
            # For whoever comes after.
            self._inboxes[rank].put(None)
            self.check()
            raise EngineError(f"process {rank} has no engine any more")
        return message[0]

    def everyones(self, value: Any) -> list[Any]:
        """Return the values that the processes give, by rank; all of them call this.

        Raises:
            EngineError: a process is lost.
        """
        if self.is_first:
            values = [value, *(self.receive(rank) for rank in self._peers)]
            self.announce(values)
        else:
            self._send(self._peers[FIRST], ("news", value))
            values = self.receive()
        return values

    def check_equal(self, values: Mapping[str, Any]) -> None:
        """Check that all processes give the same values; all of them call this.

        Raises:
            InvalidConfigError: they do not.
            EngineError: a process is lost.
        """
        first, *others = self.everyones(dict(values))
        for rank, other in enumerate(others, 1):
            for name, value in first.items():
                if other[name] != value:
                    raise InvalidConfigError(
                        f"{name} is {value!r} in the first process and {other[name]!r} in process "
                        f"{rank}; allowed is the same in all"
                    )

    def check(self) -> None:
        """Check that all processes are there.

        Raises:
            EngineError: one is lost.
        """
        if self._lost is not None:
            raise EngineError(self._lost)

    def fail(self, reason: str) -> None:
        """Let all processes know that this one cannot go on with what they do together."""
        self._lose(f"process {self.rank} failed: {reason}")

    @contextmanager
    def reporting(self, what: str) -> Iterator[None]:
        """Let all processes know when ``what`` fails in this one.

        Raises:
            EngineError: it failed since another process is lost.
        """
        try:
            yield
        except BaseException as error:
            if isinstance(error, RuntimeError):
                # A collective that failed fails before it is known why.
                self._noticed.wait(2 * _GRACE_SECONDS)
                self.check()
            self.fail(f"{what} failed: {type(error).__name__}: {error}")
            raise

    def close(self) -> None:
        """Leave: the others are told that this is no failure. The second time does nothing."""
        if not self._has_left:
            self._has_left = True
            for peer in self._peers.values():
                self._send(peer, ("left", None))

    def _connected(self, device: torch.device) -> dict[int, _Connection]:
        if not self.is_first:
            address, key = self._broadcast(None, device)
            peer = connection.Client(address, authkey=key)
            peer.send(self.rank)
            return {FIRST: peer}
        key = os.urandom(_KEY_BYTES)
        host = os.environ.get("MASTER_ADDR", "localhost")
        with connection.Listener((host, 0), backlog=self.size, authkey=key) as listener:
            self._broadcast((listener.address, key), device)
            peers = [listener.accept() for _ in range(1, self.size)]
        return dict(sorted((peer.recv(), peer) for peer in peers))

    @staticmethod
    def _broadcast(value: Any, device: torch.device) -> Any:
        values = [value]
        dist.broadcast_object_list(values, FIRST, device=device)
        return values[0]

    def _send(self, peer: _Connection, message: tuple[str, Any]) -> None:
        # What cannot be sent is no matter: who listens finds out why. Several threads may send.
        with self._sending, suppress(OSError):
            peer.send(message)

    def _listen(self) -> None:
        """Take in what comes, until all others have left or ended."""
        # No connection is closed before: what is in it, unread, would be lost with it.
        open_peers = {peer: rank for rank, peer in self._peers.items()}
        while open_peers:
            ready = connection.wait(list(open_peers))
            for peer, rank in list(open_peers.items()):
                if peer not in ready:
                    continue
                kind, message = _received(peer)
                if kind == "news":
                    self._inboxes[rank].put((message,))
                elif kind == "lost":
                    self._lose(str(message))
                else:
                    del open_peers[peer]
                    if kind == "ended" and not self._has_left:
                        time.sleep(_GRACE_SECONDS)
                        self._lose(f"process {rank} has ended")
                    self._inboxes[rank].put(None)
        for peer in self._peers.values():
            peer.close()

    def _lose(self, reason: str) -> None:
        with self._losing:
            if self._lost is not None or self._has_left:
                return
            self._lost = reason
        self._noticed.set()
        for rank, peer in self._peers.items():
            self._send(peer, ("lost", reason))
            self._inboxes[rank].put(None)
        group = self._group()
        if self._has_begun and group is not None:
            _broken[group] = reason
        if self._break_off is not None:
            background.start(self._break_off, "chunkcache-break-off")


def _received(peer: _Connection) -> tuple[str, Any]:
    try:
        message: tuple[str, Any] = peer.recv()
    except (EOFError, OSError):
        return "ended", None
    except Exception as error:
        return "lost", f"what a process told was not understood: {error!r}"
    return message
