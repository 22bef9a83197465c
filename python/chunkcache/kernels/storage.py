"""K and V of a `ChunkCache` on a CUDA device: the arena, and the launches of its steps.

All work of one cache is in one order, whatever streams it is submitted to: where the stream
changes, the new one waits for what the old one has been given. So a chunk that is freed or evicted
is written again only after everything that reads it.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from chunkcache import _arrays
from chunkcache._arrays import FP8
from chunkcache._core import DeviceCache, Plan
from chunkcache.errors import InvalidConfigError, KernelError
from chunkcache.kernels import frontend
from chunkcache.kernels.costs import costs_of
from chunkcache.kernels.driver import check, driver, on_device
from chunkcache.kernels.exposed import elements
from chunkcache.kernels.image import DeviceImage, TableState, Workspace
from chunkcache.kernels.scales import check_unused, layer_scales
from chunkcache.kernels.streams import StreamOrder, use_stream
from chunkcache.kernels.tensors import ELEMENTS, KV_ELEMENTS, dtype_name
from chunkcache.kernels.tpp import HEAD_DIMS, DeviceWords, TppAttention, best_path

if TYPE_CHECKING:
    import torch

    from chunkcache.kernels.graphs import CapturedStep


_MAX_DIM = 1 << 16
_MAX_CAPACITY = 2**32 - 2


class KvShape(NamedTuple):
    """The sizes of a cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    chunk_size: int

    @property
    def item_size(self) -> int:
        """Bytes of an element."""
        return 1 if self.dtype == FP8 else 2

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk's K and V over all layers."""
        rows = self.num_layers * 2 * self.num_kv_heads * self.chunk_size
        return rows * self.head_dim * self.item_size


def check_shape(shape: KvShape) -> None:
    """Refuse what the kernels were not written for.

    Raises:
        InvalidConfigError: a size or a dtype that is not allowed on a CUDA device.
    """
    for name, size in (("num_layers", shape.num_layers), ("num_kv_heads", shape.num_kv_heads)):
        _arrays.index(name, size, 1, _MAX_DIM)
    if shape.dtype not in KV_ELEMENTS:
        allowed = " or ".join(KV_ELEMENTS)
        raise InvalidConfigError(f"dtype: got {shape.dtype}, allowed on a CUDA device is {allowed}")
    if _arrays.index("head_dim", shape.head_dim, HEAD_DIMS[0], HEAD_DIMS[-1]) not in HEAD_DIMS:
        allowed = " or ".join(map(str, HEAD_DIMS))
        raise InvalidConfigError(
            f"head_dim: got {shape.head_dim}, allowed on a CUDA device is {allowed}"
        )
    if _arrays.index("chunk_size", shape.chunk_size, 16, 128) % 16:
        raise InvalidConfigError(
            f"chunk_size: got {shape.chunk_size}, allowed is 16 to 128, a multiple of 16"
        )


class DeviceStorage:
    """The device's half of a cache.

    Attributes:
        host: the half on the host: the tree and the plans' tables.
        device: CUDA ordinal.
        shape: the sizes.
    """

    def __init__(
        self,
        device: int,
        shape: KvShape,
        capacity: int,
        num_qo_heads: int | None,
        enable_prefix_sharing: bool,
        k_scale: Any,
        v_scale: Any,
    ) -> None:
        """Allocate the arena.

        Args:
            device: CUDA ordinal.
            shape: the sizes.
            capacity: chunks.
            num_qo_heads: query heads that plans are cut for at first; those of the first `attend`
                if None.
            enable_prefix_sharing: without it nothing is shared.
            k_scale: of keys in fp8; see `ChunkCache`.
            v_scale: of values.

        Raises:
            InvalidConfigError: sizes that are not allowed.
            KernelError: no device or driver, or too little device memory.
        """
        check_shape(shape)
        check_unused(shape.dtype, k_scale=k_scale, v_scale=v_scale)
        heads = shape.num_kv_heads if num_qo_heads is None else num_qo_heads
        # Plans are cut alike for all types of q.
        q_element = ELEMENTS.get(shape.dtype, "F16")
        attention = self._attention_for(device, shape, q_element, heads)
        self._scales: list[Any] | None = None
        if shape.dtype == FP8:
            self._scales = [
                layer_scales(name, given, shape.num_layers, shape.num_kv_heads, device)
                for name, given in (("k_scale", k_scale), ("v_scale", v_scale))
            ]
        self.device = device
        self.shape = shape
        self._memory = DeviceWords(device, shape.chunk_bytes * capacity)
        self.host = DeviceCache(
            self._memory.address,
            (
                shape.num_layers,
                capacity,
                shape.num_kv_heads,
                shape.chunk_size,
                shape.head_dim,
                shape.item_size,
            ),
            attention.heads.packed(),
            costs_of(device).for_item_size(shape.item_size).packed(),
            enable_prefix_sharing,
        )
        dtype = getattr(sys.modules["torch"], shape.dtype)
        sizes = (capacity, 2, shape.num_kv_heads, shape.chunk_size, shape.head_dim)
        self._layers = [
            elements(self._memory, self.host.layer(layer)[0], sizes, dtype, device)
            for layer in range(shape.num_layers)
        ]
        self._paged = [
            frontend.PagedKv(
                pages[:, 0].transpose(1, 2),
                pages[:, 1].transpose(1, 2),
                *(scale[layer] for scale in self._scales or ()),
            )
            for layer, pages in enumerate(self._layers)
        ]
        pages = (shape.num_layers, *sizes)
        self._arena = frontend.Arena(
            elements(self._memory, self._memory.address, pages, dtype, device)
        )
        self._order = StreamOrder(device)
        self._lock = threading.RLock()
        self._image: DeviceImage | None = None
        self._workspace: Workspace | None = None
        self._capturing: CapturedStep | None = None

    @staticmethod
    def _attention_for(
        device: int, shape: KvShape, q_element: str, num_qo_heads: int
    ) -> TppAttention:
        kv_element = KV_ELEMENTS[shape.dtype]
        return TppAttention(
            device,
            q_element,
            kv_element,
            num_qo_heads,
            shape.num_kv_heads,
            shape.head_dim,
            best_path(device, kv_element),
        )

    @contextmanager
    def submitting(self, stream: Any = None) -> Iterator[int]:
        """Give work to a stream, after all that the cache has been given before.

        Args:
            stream: a torch stream or a handle; torch's current stream if None.

        Yields:
            The stream's handle.
        """
        torch: Any = sys.modules["torch"]
        with self._lock, torch.cuda.device(self.device), use_stream(stream, self.device) as handle:
            if self._capturing is None:
                self._order.enter(handle)
                self._make_copies()
            yield handle

    def _make_copies(self) -> None:
        for run in self.host.take_copies():
            self._arena.copy_chunk_heads(run)

    def kv_layer(self, layer: int) -> "torch.Tensor":
        """Return one layer `[chunks, 2, num_kv_heads, chunk_size, head_dim]`, without a copy."""
        with self.submitting():
            return self._layer(layer)

    def _layer(self, layer: int) -> "torch.Tensor":
        return self._layers[self._index(layer)]

    def _index(self, layer: Any) -> int:
        return _arrays.index("layer", layer, 0, self.shape.num_layers - 1)

    def write_kv(self, layer: int, k: Any, v: Any, plan: Plan, stream: Any) -> None:
        """Write one layer's K and V of a step; see `ChunkCache.write_kv`."""
        kv = self._paged[self._index(layer)]
        with self.submitting(stream) as handle:
            image = self._synced(plan, handle)
            slots = image.slot_mapping[: plan.num_rows]
            frontend.write_kv(k, v, slots, kv)

    def attend(
        self,
        layer: int,
        q: Any,
        plan: Plan,
        options: frontend.Options,
        out: Any,
        lse: Any,
        stream: Any,
    ) -> Any:
        """Attention of a step's queries in one layer; see `ChunkCache.attend`."""
        kv = self._paged[self._index(layer)]
        with self.submitting(stream) as handle:
            call = frontend.prepare(plan.num_rows, q, kv, options, out, lse)
            q_element, num_qo_heads = ELEMENTS[dtype_name(call.q)], call.q.shape[1]
            attention = self._attention_for(self.device, self.shape, q_element, num_qo_heads)
            image = self._synced(plan, handle, attention)
            workspace = self._workspace_for(TableState.of(self.host, plan), handle)
            frontend.launch(attention, image.tables(workspace), kv, call, options)
            return call.result(options)

    def read_kv(
        self, layer: int, seq: int, begin: int, end: int, stream: Any
    ) -> tuple["torch.Tensor", "torch.Tensor"]:
        """Read one layer's K and V of a sequence's tokens; see `ChunkCache.read_kv`."""
        pages = self._layer(layer)
        torch: Any = sys.modules["torch"]
        size = self.shape.chunk_size
        with self.submitting(stream):
            chunks = torch.tensor(self.host.chunks_of(seq, begin, end), dtype=torch.int64)
            index = chunks.pin_memory().to(pages.device, non_blocking=True)
            # As plain bytes: torch indexes few things in fp8.
            stored = pages.view(torch.uint8) if self._scales else pages
            found = stored.index_select(0, index).permute(1, 0, 3, 2, 4)
            first = begin // size * size
            rows = found.reshape(2, -1, self.shape.num_kv_heads, self.shape.head_dim)
            k, v = rows[:, begin - first : end - first]
            if self._scales:
                k, v = (
                    x.view(pages.dtype).float() * scale[layer][:, None]
                    for x, scale in zip((k, v), self._scales, strict=True)
                )
            return k, v

    def _synced(
        self, plan: Plan, stream: int, attention: TppAttention | None = None
    ) -> DeviceImage:
        """Return the image, brought to a plan's tables (cut for the kernel's heads, if given)."""
        state = TableState.of(self.host, plan)
        if attention is not None and state.num_qo_heads != attention.num_qo_heads:
            self.host.set_heads(plan, attention.heads.packed())
            state = TableState.of(self.host, plan)
        if self._capturing is not None:
            return self._capturing.image_for(plan)
        image = self.image_of(plan, state, stream)
        if image.held != (state.image_id, state.version):
            image.send(self.host, plan, state, stream)
            image.apply(stream)
        return image

    def image_of(self, plan: Plan, state: TableState, stream: int) -> DeviceImage:
        """Return the image for tables of this layout: the present one, or a new one."""
        if self._image is None or self._image.layout != state.layout:
            words = self.host.max_patch_words(plan)
            size = self.shape.chunk_size
            self._image = DeviceImage(self.device, state.layout, words, size, stream)
        return self._image

    def _workspace_for(self, state: TableState, stream: int) -> Workspace:
        if self._capturing is not None:
            return self._capturing.workspace_for(state)
        return self.workspace(state, state.num_slots, stream)

    def workspace(self, state: TableState, num_slots: int, stream: int) -> Workspace:
        """Return a workspace with room for so many partial states, the present one if it has."""
        held = self._workspace
        if held is None or not held.has_room(num_slots, state.num_qo_heads):
            head_dim = self.shape.head_dim
            held = Workspace(self.device, num_slots, state.num_qo_heads, head_dim)
            held.prepare(stream)
            self._workspace = held
        return held

    @contextmanager
    def capturing(self, step: "CapturedStep") -> Iterator[None]:
        """Let launches be recorded by a captured step instead of run."""
        with self._lock:
            if self._capturing is not None:
                raise KernelError("capture: got a second one, allowed is one at a time")
            self._capturing = step
            try:
                yield
            finally:
                self._capturing = None


def device_ordinal(device: Any) -> int | None:
    """Return the CUDA ordinal that a device argument names, None for the CPU.

    Raises:
        InvalidConfigError: something else, or a device that is not there.
    """
    allowed = "'cpu', 'cuda', 'cuda:N', a CUDA ordinal or a torch.device"
    given = _arrays.described(device)
    if isinstance(device, int) and not isinstance(device, bool):
        name, number = "cuda", given
    else:
        name, _, number = str(device).partition(":")
    if name == "cpu":
        return None
    if name != "cuda" or (number and not number.isdecimal()):
        raise InvalidConfigError(f"device: got {given}, allowed is {allowed}")
    try:
        import torch
    except ImportError as missing:
        raise InvalidConfigError(
            f"device: got {given}, which needs torch: pip install 'chunkcache[torch,cuda]'"
        ) from missing
    count = torch.cuda.device_count()
    ordinal = int(number) if number else (torch.cuda.current_device() if count else 0)
    if ordinal >= count:
        raise InvalidConfigError(
            f"device: got {given}, allowed is one of the {count} CUDA devices here"
        )
    return ordinal


def num_chunks(
    device: int,
    shape: KvShape,
    capacity: int | None,
    capacity_bytes: int | None,
    memory_fraction: Any,
) -> int:
    """Return the chunks of an arena from the one of three sizes that is given.

    Raises:
        InvalidConfigError: a size that is no number in its range, or less than a chunk.
        KernelError: no CUDA driver.
    """
    check_shape(shape)
    chunk_bytes = shape.chunk_bytes
    if capacity is not None:
        return _arrays.index("capacity", capacity, 1, _MAX_CAPACITY)
    if capacity_bytes is not None:
        high = _MAX_CAPACITY * chunk_bytes
        return _arrays.index("capacity_bytes", capacity_bytes, chunk_bytes, high) // chunk_bytes
    given = _arrays.described(memory_fraction)
    if type(memory_fraction) not in (int, float) or not 0 < memory_fraction <= 1:
        raise InvalidConfigError(f"memory_fraction: got {given}, allowed is a number in (0, 1]")
    with on_device(device):
        free, _ = check(driver().cuMemGetInfo(), "cuMemGetInfo")
    num_bytes = int(free * memory_fraction)
    if num_bytes < chunk_bytes:
        raise InvalidConfigError(
            f"memory_fraction: got {given}, {num_bytes} bytes, allowed is at least the"
            f" {chunk_bytes} bytes of one chunk"
        )
    return num_bytes // chunk_bytes
