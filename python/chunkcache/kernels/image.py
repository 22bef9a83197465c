"""The tables of a cache's steps on its device.

One image of words at fixed addresses follows the plans' tables in host memory. What changed goes
there as one copy from pinned memory, to be applied by the first launch of the step; a step whose
structure is that of the step before copies nothing, and that launch advances its lengths.
"""

import struct
from typing import Any, NamedTuple, TypeAlias

from chunkcache._core import BlockTablePlanner, DeviceCache, Plan
from chunkcache.kernels.driver import Launch, limits, load
from chunkcache.kernels.exposed import int64_words
from chunkcache.kernels.params import TableAddresses
from chunkcache.kernels.staging import CudaTransfers, StagingRing
from chunkcache.kernels.table import find
from chunkcache.kernels.tpp import NOT_WRITTEN, DeviceWords

_NUM_ITEMS = 13  # words of the header before the number of items (rust/core/src/plan/layout.rs)
_THREADS = 1024


#: Who has the tables of plans: a cache, or a planner over block tables.
TableHost: TypeAlias = DeviceCache | BlockTablePlanner


class TableLayout(NamedTuple):
    """Word offsets of what kernels read, and sizes; fixed for the life of an image."""

    sequences: int
    page_ids: int
    items: int
    merge_items: int
    tokens: int
    merges: int
    pad_rows: int
    num_words: int
    max_rows: int


class TableState(NamedTuple):
    """What an open plan's tables are: whose they are, and what their launches need."""

    image_id: int
    version: int
    layout: TableLayout
    num_qo_heads: int
    num_slots: int

    @classmethod
    def of(cls, host: TableHost, plan: Plan) -> "TableState":
        """Return the state of a plan's tables.

        Raises:
            StalePlanError: the plan is closed, or its tables serve a later one.
            InvalidConfigError: not a plan of this host.
        """
        image_id, version, layout, num_qo_heads, num_slots = host.tables(plan)
        return cls(image_id, version, TableLayout(*layout), num_qo_heads, num_slots)


class Workspace:
    """Partial states and the queue of one launch after another."""

    def __init__(self, device: int, num_slots: int, num_qo_heads: int, head_dim: int) -> None:
        """Allocate the workspace; `prepare` comes before its first launch.

        Args:
            device: CUDA ordinal.
            num_slots: partial states, rounded up to a multiple of 8.
            num_qo_heads: query heads of the steps that it is for.
            head_dim: columns of a partial state.
        """
        num_slots = -(-num_slots // 8) * 8
        self.num_slots = num_slots
        self.num_qo_heads = num_qo_heads
        self.head_dim = head_dim
        self._queue = DeviceWords(device, 4 * (2 + limits(device).num_multiprocessors))
        self._lse_bytes = -(-4 * num_slots * (head_dim // 16) // 256) * 256
        self._partials = DeviceWords(device, self._lse_bytes + 4 * num_slots * head_dim)

    def has_room(self, num_slots: int, num_qo_heads: int) -> bool:
        """Return whether steps of this kind can use the workspace."""
        return num_slots <= self.num_slots and num_qo_heads == self.num_qo_heads

    def prepare(self, stream: int) -> None:
        """Bring the memory into the state that every launch finds and leaves."""
        self._queue.fill(0, stream)
        self._partials.fill(NOT_WRITTEN, stream)

    def addresses(self) -> dict[str, int]:
        """Return what `TableAddresses` takes."""
        return {
            "partial_out": self._partials.address + self._lse_bytes,
            "partial_lse": self._partials.address,
            "queue": self._queue.address,
        }


class ImageTables(NamedTuple):
    """The tables of an image with a workspace, for `TppAttention.launch`."""

    page_size: int
    addresses: TableAddresses


class DeviceImage:
    """The image of tables on a device, and each row's position and slot.

    Attributes:
        layout: where the tables are in the image.
        held: image and version on the host that the copy is equal to after what was submitted.
        positions: int64 `[max_rows]` on the device: each row's position in its sequence.
        slot_mapping: int64 `[max_rows]` on the device: the slot of each row's K/V, -1 for none.
    """

    def __init__(
        self, device: int, layout: TableLayout, max_patch_words: int, page_size: int, stream: int
    ) -> None:
        """Allocate everything in full size.

        Args:
            device: CUDA ordinal.
            layout: of the tables.
            max_patch_words: words of the longest patch.
            page_size: tokens per chunk.
            stream: handle of the stream that uses the image first.
        """
        self.layout = layout
        self.held = (0, 0)
        self._page_size = page_size
        self._steps = 0
        self._ring = StagingRing(CudaTransfers(device), max_patch_words)
        self._words = DeviceWords(device, 4 * layout.num_words)
        self._patch = DeviceWords(device, 4 * max_patch_words)
        self._state = DeviceWords(device, 8)
        self._rows = DeviceWords(device, 16 * layout.max_rows)
        for memory, word in ((self._words, 0), (self._patch, 0), (self._state, 0)):
            memory.fill(word, stream)
        self.positions: Any = int64_words(self._rows, 0, layout.max_rows, device)
        self.slot_mapping: Any = int64_words(self._rows, layout.max_rows, layout.max_rows, device)
        params = struct.pack(
            "<5Q2I",
            self._words.address,
            self._patch.address,
            self._state.address,
            self._rows.address,
            self._rows.address + 8 * layout.max_rows,
            layout.max_rows,
            0,
        )
        self._apply = Launch(load(find("apply_tables"), device, 0), 1, _THREADS, 0, params)

    def send(self, host: TableHost, plan: Plan, state: TableState, stream: int) -> None:
        """Copy what changed since the tables that the image holds; the next `apply` applies it.

        Args:
            host: who has the plan's tables.
            plan: the step.
            state: of its tables.
            stream: handle of the stream.
        """
        step = self._steps + 1 & 0xFFFFFFFF
        buffer = self._ring.take()
        num_words = host.stage(plan, self.held, buffer, self._ring.num_words, step)
        if num_words:
            self._ring.send(self._patch.address, num_words, stream)
        self._steps = step
        self.held = (state.image_id, state.version)

    def apply(self, stream: int) -> None:
        """Launch what brings the image to the step that was sent last."""
        self._apply.run(stream)

    def tables(self, workspace: Workspace) -> ImageTables:
        """Return the tables for launches that use a workspace."""
        base, layout = self._words.address, self.layout
        return ImageTables(
            self._page_size,
            TableAddresses(
                header=base + 4 * _NUM_ITEMS,
                items=base + 4 * layout.items,
                merge_items=base + 4 * layout.merge_items,
                tokens=base + 4 * layout.tokens,
                sequences=base + 4 * layout.sequences,
                merges=base + 4 * layout.merges,
                page_ids=base + 4 * layout.page_ids,
                pad_rows=base + 4 * layout.pad_rows,
                **workspace.addresses(),
            ),
        )
