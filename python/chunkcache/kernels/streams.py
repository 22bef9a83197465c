"""Streams: which one work goes to, and what it waits for."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from chunkcache.errors import InvalidConfigError
from chunkcache.kernels.driver import check, driver, on_device
from chunkcache.kernels.tensors import stream_of


@contextmanager
def use_stream(stream: Any, device: int) -> Iterator[int]:
    """Make a stream torch's current one and yield its handle.

    Args:
        stream: a torch stream or a handle; the current stream if None.
        device: CUDA ordinal.

    Raises:
        InvalidConfigError: a stream of another device, or no stream.
    """
    if stream is None:
        yield stream_of(device)
        return
    torch: Any = sys.modules["torch"]
    if isinstance(stream, int) and not isinstance(stream, bool):
        stream = torch.cuda.ExternalStream(stream, device=f"cuda:{device}")
    if not isinstance(stream, torch.cuda.Stream) or stream.device.index != device:
        found = getattr(stream, "device", type(stream).__name__)
        raise InvalidConfigError(
            f"stream: got {found}, allowed is a torch.cuda.Stream or a handle on cuda:{device}"
        )
    with torch.cuda.stream(stream):
        yield int(stream.cuda_stream)


class StreamOrder:
    """Puts the work of several streams into the order in which it is submitted."""

    def __init__(self, device: int) -> None:
        """Begin with no work."""
        self._device = device
        self._last: int | None = None
        self._event: Any = None

    def enter(self, stream: int) -> None:
        """Let a stream wait for all that the stream before has been given."""
        if self._last is not None and self._last != stream:
            cu = driver()
            with on_device(self._device):
                if self._event is None:
                    flag = cu.CUevent_flags.CU_EVENT_DISABLE_TIMING
                    self._event = check(cu.cuEventCreate(flag), "cuEventCreate")
                check(cu.cuEventRecord(self._event, self._last), "cuEventRecord")
                check(cu.cuStreamWaitEvent(stream, self._event, 0), "cuStreamWaitEvent")
        self._last = stream
