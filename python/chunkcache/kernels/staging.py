"""Pinned host memory that travels to the device without a wait."""

from typing import Any, Protocol

from chunkcache.kernels.driver import check, driver, on_device


class Transfers(Protocol):
    """What a ring needs of a device."""

    def allocate(self, num_bytes: int) -> int:
        """Return the address of new pinned memory."""

    def free(self, address: int) -> None:
        """Give pinned memory back."""

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> Any:
        """Begin a copy to the device on a stream and return an event that follows it."""

    def wait(self, event: Any) -> None:
        """Wait on the host until an event has come."""


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

    def copy(self, target: int, source: int, num_bytes: int, stream: int) -> Any:
        """Begin a copy to the device on a stream and return an event that follows it."""
        cu = driver()
        with on_device(self._device):
            check(cu.cuMemcpyHtoDAsync(target, source, num_bytes, stream), "copy of tables")
            flag = cu.CUevent_flags.CU_EVENT_DISABLE_TIMING
            event = check(cu.cuEventCreate(flag), "cuEventCreate")
            check(cu.cuEventRecord(event, stream), "cuEventRecord")
        return event

    def wait(self, event: Any) -> None:
        """Wait on the host until an event has come, and end it."""
        cu = driver()
        check(cu.cuEventSynchronize(event), "cuEventSynchronize")
        check(cu.cuEventDestroy(event), "cuEventDestroy")


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
        self._events: list[Any] = [None] * num_buffers
        self._next = 0

    def take(self) -> int:
        """Return the address of the next buffer, which no copy reads any more."""
        event, self._events[self._next] = self._events[self._next], None
        if event is not None:
            self._transfers.wait(event)
        return self._buffers[self._next]

    def send(self, target: int, num_words: int, stream: int) -> None:
        """Copy the first words of the buffer that was taken last to the device, and move on.

        Args:
            target: device address.
            num_words: words to copy.
            stream: handle of the stream.
        """
        source = self._buffers[self._next]
        self._events[self._next] = self._transfers.copy(target, source, 4 * num_words, stream)
        self._next = (self._next + 1) % len(self._buffers)

    def __del__(self) -> None:
        """Wait for the copies and free the buffers."""
        for event in self.__dict__.pop("_events", []):
            if event is not None:
                self._transfers.wait(event)
        for address in self.__dict__.pop("_buffers", []):
            self._transfers.free(address)
