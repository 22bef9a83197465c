"""Two-phase attention over any plan on one CUDA device.

`TppTables` holds a plan's tables and the workspace on the device; `TppAttention` is one compiled
head shape. Addresses are plain integers, so that the module needs neither torch nor cupy.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from chunkcache._arrays import FP8
from chunkcache.errors import InvalidConfigError, KernelError
from chunkcache.kernels.build import Instance
from chunkcache.kernels.driver import (
    Launch,
    TensorBox,
    check,
    driver,
    limits,
    load,
    on_device,
    tensor_map,
)
from chunkcache.kernels.params import (
    Operands,
    Scores,
    Shape,
    Strides,
    TableAddresses,
    tpp_params,
)
from chunkcache.kernels.table import find
from chunkcache.kernels.work import STAGE_KEYS, Heads, PlanTables, Schedule

Path = Literal["sm_90", "sm_89", "sm_80"]

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
ELEMENTS = ("F16", "BF16")
KV_ELEMENTS = (*ELEMENTS, "E4M3")
FP8_CAPABILITY = (8, 9)  # the first devices that convert e4m3
MAX_STAGES = 24
NOT_WRITTEN = 0x80000000  # of a word of a partial state between launches (cuda/tpp/merge.cuh)
CONTROL_BYTES = 8192  # `Control` in cuda/tpp/layout.cuh, rounded up


@dataclass(frozen=True)
class Pages:
    """K and V pages by address and strides in bytes.

    Attributes:
        k: address of K's page 0.
        v: address of V's page 0.
        k_strides: K's strides.
        v_strides: V's strides.
        num_pages: pages that may be read.
        page_size: tokens of a page, a multiple of 16.
        k_scale: address of K's scales, float32 for each head, where it is of 8 bits; 0 for 1.
        v_scale: address of V's scales.
    """

    k: int
    v: int
    k_strides: Strides
    v_strides: Strides
    num_pages: int
    page_size: int
    k_scale: int = 0
    v_scale: int = 0


def best_path(device: int, kv_element: str, name: str = "dtype") -> Path:
    """Return the path of a device's best kernels over K and V of some type.

    Args:
        device: CUDA ordinal.
        kv_element: one of `KV_ELEMENTS`.
        name: the argument that the type comes from, for messages.

    Raises:
        InvalidConfigError: the device does not convert fp8.
    """
    major, minor = capability = limits(device).capability
    if kv_element == "E4M3":
        if capability < FP8_CAPABILITY:
            raise InvalidConfigError(
                f"{name}: got {FP8} on a device of compute capability {major}.{minor}, allowed"
                f" there is float16 or bfloat16; fp8 needs {'.'.join(map(str, FP8_CAPABILITY))} or"
                " more"
            )
        return "sm_89"
    return "sm_90" if capability == (9, 0) else "sm_80"


class DeviceWords:
    """Device memory owned by this object, freed with it."""

    def __init__(self, device: int, num_bytes: int) -> None:
        """Allocate at least one byte on a device."""
        self._device = device
        self.num_bytes = num_bytes
        with on_device(device):
            self.address = int(check(driver().cuMemAlloc(max(num_bytes, 256)), "cuMemAlloc"))

    def write(self, data: np.ndarray[Any, Any], stream: int) -> None:
        """Copy an array to the start of the memory and wait for it."""
        data = np.ascontiguousarray(data)
        cu = driver()
        with on_device(self._device):
            check(cu.cuMemcpyHtoDAsync(self.address, data.ctypes.data, data.nbytes, stream), "copy")
            check(cu.cuStreamSynchronize(stream), "cuStreamSynchronize")

    def fill(self, word: int, stream: int) -> None:
        """Set every 32-bit word."""
        words = max(self.num_bytes // 4, 1)
        with on_device(self._device):
            check(driver().cuMemsetD32Async(self.address, word, words, stream), "memset")

    def __del__(self) -> None:
        """Free the memory."""
        address = self.__dict__.pop("address", None)
        if address is not None:
            # At the end of the process the driver may be gone, and the memory with it.
            with suppress(KernelError), on_device(self._device):
                driver().cuMemFree(address)


class Tables(Protocol):
    """A step's tables on the device, with the workspace of its launches."""

    @property
    def page_size(self) -> int:
        """Tokens of a page."""

    @property
    def addresses(self) -> TableAddresses:
        """Where the tables and the workspace are."""


class TppTables:
    """A plan's tables on the device, and the workspace of its launches.

    One launch at a time uses them: launches that may overlap need tables of their own.
    """

    def __init__(
        self,
        device: int,
        plan: PlanTables,
        schedule: Schedule,
        head_dim: int,
        stream: int,
    ) -> None:
        """Copy the tables to the device.

        Args:
            device: CUDA ordinal.
            plan: the context tables.
            schedule: `cut_plan(plan, ...)`.
            head_dim: columns of a partial state.
            stream: handle of the stream to copy on.
        """
        self.device = device
        self.page_size = plan.page_size
        self.num_items = len(schedule.items)
        # Every block reads a row before it knows how many there are.
        missing = max(limits(device).num_multiprocessors - len(schedule.items), 0)
        parts = {
            "header": np.array(
                [len(schedule.items), len(schedule.pad_rows), len(schedule.merge_items)],
                dtype=np.uint32,
            ),
            "items": np.pad(schedule.items, ((0, missing), (0, 0))),
            "merge_items": schedule.merge_items,
            "tokens": schedule.tokens,
            "sequences": plan.sequences,
            "merges": schedule.merges,
            "page_ids": plan.page_ids,
            "pad_rows": schedule.pad_rows,
        }
        offsets = {}
        words: list[np.ndarray[Any, Any]] = []
        used = 0
        for name, part in parts.items():
            offsets[name] = used
            flat = np.ascontiguousarray(part, dtype=np.uint32).reshape(-1)
            padding = -len(flat) % 32
            words += [flat, np.zeros(padding, dtype=np.uint32)]
            used += 4 * (len(flat) + padding)
        self._tables = DeviceWords(device, used)
        self._tables.write(np.concatenate(words), stream)
        self._queue = DeviceWords(device, 4 * (2 + limits(device).num_multiprocessors))
        self._queue.fill(0, stream)
        lse_bytes = -(-4 * schedule.num_slots * (head_dim // 16) // 256) * 256
        self._partials = DeviceWords(device, lse_bytes + 4 * schedule.num_slots * head_dim)
        self._partials.fill(NOT_WRITTEN, stream)
        base = self._tables.address
        self.addresses = TableAddresses(
            **{name: base + offset for name, offset in offsets.items()},
            partial_out=self._partials.address + lse_bytes,
            partial_lse=self._partials.address,
            queue=self._queue.address,
        )


@dataclass(frozen=True)
class TppAttention:
    """One compiled head shape on one device.

    Attributes:
        device: CUDA ordinal.
        element: type of q and the output: `F16` or `BF16`.
        kv_element: type of K and V: that of q, or `E4M3`.
        num_qo_heads: query heads.
        num_kv_heads: K/V heads.
        head_dim: one of `HEAD_DIMS`.
        path: `sm_90` (bulk tensor copies) or `sm_80` (cp.async); `sm_89`, which is `sm_80` over
            fp8.
    """

    device: int
    element: str
    kv_element: str
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    path: Path

    def __post_init__(self) -> None:
        """Refuse shapes that no kernel was written for."""
        if self.head_dim not in HEAD_DIMS:
            raise InvalidConfigError(f"head_dim: got {self.head_dim}, allowed is {HEAD_DIMS}")
        if self.element not in ELEMENTS:
            raise InvalidConfigError(f"dtype: got {self.element}, allowed is {ELEMENTS}")
        if self.kv_element not in (self.element, "E4M3"):
            raise InvalidConfigError(
                f"dtype: got K and V of {self.kv_element}, allowed for q of {self.element} is the"
                " same or E4M3"
            )
        if (self.path == "sm_89") != (self.kv_element == "E4M3"):
            raise InvalidConfigError(
                f"path: got {self.path}, allowed for K and V of {self.kv_element} is another one"
            )
        if self.num_qo_heads % self.num_kv_heads:
            raise InvalidConfigError(
                f"num_qo_heads: got {self.num_qo_heads}, allowed is a multiple of "
                f"num_kv_heads = {self.num_kv_heads}"
            )

    @property
    def heads(self) -> Heads:
        """The head shape that items are cut for."""
        return Heads(
            self.num_kv_heads,
            self.num_qo_heads // self.num_kv_heads,
            self._consumer_warps,
            grouped=self.path == "sm_90" and self.head_dim in (64, 128, 192),
        )

    @property
    def item_size(self) -> int:
        """Bytes of an element of K or V."""
        return 1 if self.kv_element == "E4M3" else 2

    @property
    def _consumer_warps(self) -> int:
        return 8 if self.head_dim <= 128 else 4

    @property
    def _stage_bytes(self) -> int:
        return 2 * -(-self.head_dim * self.item_size // 128) * 128 * STAGE_KEYS

    @property
    def _q_bytes(self) -> int:
        in_registers = 112 if self.kv_element == "E4M3" else 192
        in_shared = self.head_dim > in_registers
        return self._consumer_warps * 16 * self.head_dim * 2 if in_shared else 0

    @property
    def _fixed_bytes(self) -> int:
        """Shared memory beside the ring: alignment, q and `Control`."""
        return 1024 + self._q_bytes + CONTROL_BYTES

    @property
    def instance(self) -> Instance:
        """The entry point that is compiled."""
        arch = {"sm_90": "sm_90a", "sm_89": "compute_89", "sm_80": "compute_80"}[self.path]
        return find(f"tpp_{self.kv_element}_{self.head_dim}".lower(), arch)

    def launch(
        self,
        tables: Tables,
        pages: Pages,
        operands: Operands,
        scores: Scores,
        *,
        overlap: bool = False,
    ) -> Launch:
        """Prepare a launch.

        Args:
            tables: the plan's tables.
            pages: K and V.
            operands: q, output and lse.
            scores: scale, cap, window.
            overlap: programmatic dependent launch (sm_90 only).

        Raises:
            InvalidConfigError: a page size or a stride that the copies cannot serve.
        """
        if pages.page_size % 16 or pages.page_size != tables.page_size:
            raise InvalidConfigError(
                f"page_size: got {pages.page_size}, allowed is a multiple of 16, equal to the "
                f"plan's {tables.page_size}"
            )
        limit = limits(self.device)
        stages = min((limit.shared_bytes - self._fixed_bytes) // self._stage_bytes, MAX_STAGES)
        shared = self._fixed_bytes + stages * self._stage_bytes
        box_tokens = STAGE_KEYS if pages.page_size % STAGE_KEYS == 0 else 16
        maps = (bytes(128), bytes(128))
        if self.path == "sm_90":
            maps = (
                self._map(pages.k, pages.k_strides, pages, box_tokens),
                self._map(pages.v, pages.v_strides, pages, box_tokens),
            )
        params = tpp_params(
            maps,
            (pages.k, pages.v),
            (pages.k_scale, pages.v_scale),
            (pages.k_strides, pages.v_strides),
            operands,
            tables.addresses,
            Shape(
                group=self.num_qo_heads // self.num_kv_heads,
                num_qo_heads=self.num_qo_heads,
                page_size=pages.page_size,
                box_tokens=box_tokens,
                ring_stages=stages,
            ),
            scores,
            q_is_bf16=self.element == "BF16",
        )
        function = load(self.instance, self.device, shared)
        return Launch(
            function,
            grid=limit.num_multiprocessors,
            block=(self._consumer_warps + 4) * 32,
            shared_bytes=shared,
            params=params,
            overlap=overlap and self.path == "sm_90",
        )

    def _map(self, address: int, strides: Strides, pages: Pages, box_tokens: int) -> bytes:
        runs = self.head_dim // 64 if self.head_dim % 64 == 0 else 1
        columns = 64 if self.head_dim % 64 == 0 else self.head_dim
        box_runs = runs if box_tokens == STAGE_KEYS else 1
        return tensor_map(
            address,
            self.element,
            TensorBox(
                (columns, pages.page_size, runs, self.num_kv_heads, pages.num_pages),
                (strides.token, 128, strides.head, strides.page),
                (64, box_tokens, box_runs),
            ),
        )
