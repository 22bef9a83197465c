"""Tables on a device that follow the plans of one planner over block tables.

What the planner keeps from plan to plan, the device keeps too: a plan of sequences that have only
grown sends what is new, most often nothing, and its items are those of the plan before.
"""

import threading
from weakref import WeakKeyDictionary

from chunkcache._core import BlockTablePlanner, Plan
from chunkcache.kernels.costs import costs_of
from chunkcache.kernels.image import DeviceImage, ImageTables, TableState, Workspace
from chunkcache.kernels.streams import StreamOrder
from chunkcache.kernels.tpp import TppAttention


class FollowedTables:
    """The copy of one planner's tables on one device."""

    def __init__(self, device: int) -> None:
        """Begin without memory."""
        self._device = device
        self._order = StreamOrder(device)
        self._lock = threading.Lock()
        self._image: DeviceImage | None = None
        self._workspace: Workspace | None = None

    def bring_to(
        self, planner: BlockTablePlanner, plan: Plan, attention: TppAttention, stream: int
    ) -> ImageTables:
        """Return the tables of a plan, cut for a kernel, after what was submitted before.

        Args:
            planner: that of the plan.
            plan: the step.
            attention: the kernel.
            stream: handle of the stream on which they will be used.

        Raises:
            StalePlanError: the plan is closed, or its tables serve a later one.
            InvalidConfigError: pages that are no multiple of 16 tokens.
        """
        with self._lock:
            heads = attention.heads.packed()
            if planner.heads(plan) != heads:
                costs = costs_of(attention.device).for_item_size(attention.item_size)
                planner.set_heads(plan, heads, costs.packed())
            state = TableState.of(planner, plan)
            self._order.enter(stream)
            image = self._image
            if image is None or image.layout != state.layout:
                words, size = planner.max_patch_words(plan), planner.page_size
                image = DeviceImage(self._device, state.layout, words, size, stream)
                self._image = image
            if image.held != (state.image_id, state.version):
                image.send(planner, plan, state, stream)
                image.apply(stream)
            return image.tables(self._workspace_for(state, attention.head_dim, stream))

    def _workspace_for(self, state: TableState, head_dim: int, stream: int) -> Workspace:
        held = self._workspace
        if (
            held is None
            or held.head_dim != head_dim
            or not held.has_room(state.num_slots, state.num_qo_heads)
        ):
            held = Workspace(self._device, state.num_slots, state.num_qo_heads, head_dim)
            held.prepare(stream)
            self._workspace = held
        return held


_followed: WeakKeyDictionary[BlockTablePlanner, dict[int, FollowedTables]] = WeakKeyDictionary()


def followed_tables(planner: BlockTablePlanner, device: int) -> FollowedTables:
    """Return the copy of a planner's tables on a device, made at first use."""
    return _followed.setdefault(planner, {}).setdefault(device, FollowedTables(device))
