"""Pinned host memory that travels to the device without a wait."""

from typing import Any, Protocol

from chunkcache.kernels.driver import check, driver, on_device


class Transfers(Protocol):
    """What a ring needs of a device."""

    def allocate(self, num_bytes: int) -> int:
        """Return the address of new pinned memory."""

    def free(self, address: int) -> None:
        """Give pinned memory back."""

    def event(self) -> Any:
        """Return a new event that follows nothing yet."""

    def copy(self, target: int, source: int, num_bytes: int, stream: int, event: Any) -> None:
        """Begin a copy to the device on a stream, and let an event follow it."""

    def wait(self, event: Any) -> None:
        """Wait on the host until what an event follows has ended."""

    def end(self, event: Any) -> None:
        """Give an event back."""


class CudaTransfers:
    """Transfers to one CUDA device."""

    def __init__(self, device: int) -> None:
        """Name the device by its ordinal."""
        self._device = device

    def allocate(self, num_bytes: int) -> int:
        """Return the address of new pinned memory."""
        with on_device(self._device):
            return int(check(driver().cuMemHostAlloc(num_bytes, 0), "cuMemHostAlloc"))

    def free(self, address: int) -> None:
        """Give pinned memory back."""
        driver().cuMemFreeHost(address)

    def event(self) -> Any:
        """Return a new event that follows nothing yet."""
        cu = driver()
        with on_device(self._device):
            flag = cu.CUevent_flags.CU_EVENT_DISABLE_TIMING
            return check(cu.cuEventCreate(flag), "cuEventCreate")

    def copy(self, target: int, source: int, num_bytes: int, stream: int, event: Any) -> None:
        """Begin a copy to the device on a stream, and let an event follow it."""
        cu = driver()
        with on_device(self._device):
            check(cu.cuMemcpyHtoDAsync(target, source, num_bytes, stream), "copy of tables")
            check(cu.cuEventRecord(event, stream), "cuEventRecord")

    def wait(self, event: Any) -> None:
        """Wait on the host until what an event follows has ended."""
        check(driver().cuEventSynchronize(event), "cuEventSynchronize")

    def end(self, event: Any) -> None:
        """Give an event back."""
        driver().cuEventDestroy(event)


class StagingRing:
    """A few buffers of pinned words that take turns, each guarded by an event.

    A buffer is written to again only when its last copy has ended, so that the host waits only if
    it is a whole ring ahead of the device.
    """

    def __init__(self, transfers: Transfers, num_words: int, num_buffers: int = 3) -> None:
        """Allocate the buffers.

        Args:
            transfers: the device.
            num_words: words of 32 bits in each buffer.
            num_buffers: two or more.
        """
        self._transfers = transfers
        self.num_words = num_words
        self._buffers = [transfers.allocate(4 * num_words) for _ in range(num_buffers)]
        self._events = [transfers.event() for _ in range(num_buffers)]
        self._is_read = [False] * num_buffers
        self._next = 0

    def take(self) -> int:
        """Return the address of the next buffer, which no copy reads any more."""
        if self._is_read[self._next]:
            self._transfers.wait(self._events[self._next])
            self._is_read[self._next] = False
        return self._buffers[self._next]

    def send(self, target: int, num_words: int, stream: int) -> None:
        """Copy the first words of the buffer that was taken last to the device, and move on.

        Args:
            target: device address.
            num_words: words to copy.
            stream: handle of the stream.
        """
        source, event = self._buffers[self._next], self._events[self._next]
        self._transfers.copy(target, source, 4 * num_words, stream, event)
        self._is_read[self._next] = True
        self._next = (self._next + 1) % len(self._buffers)

    def __del__(self) -> None:
        """Wait for the copies and free the buffers."""
        for event, is_read in zip(
            self.__dict__.pop("_events", []), self.__dict__.pop("_is_read", []), strict=True
        ):
            if is_read:
                self._transfers.wait(event)
            self._transfers.end(event)
        for address in self.__dict__.pop("_buffers", []):
            self._transfers.free(address)
