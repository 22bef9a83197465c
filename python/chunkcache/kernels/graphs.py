"""A step of a `ChunkCache` as a CUDA graph, replayed for one plan after another."""

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from chunkcache._core import Plan
from chunkcache.errors import InvalidConfigError, KernelError
from chunkcache.kernels.driver import limits
from chunkcache.kernels.image import DeviceImage, TableState, Workspace

if TYPE_CHECKING:
    import torch

    from chunkcache.kernels.storage import DeviceStorage

#: Partial states that a captured step has room for: a multiple of what the plan that it was
#: captured with needs, so many for each row and query head, and for each multiprocessor those of so
#: many items of 128 rows.
_GROWTH = 2
_PER_ROW = 16
_PER_BLOCK = 4 * 128


class CapturedStep:
    """Launches of one step, recorded once, that serve the plans to come.

    As a context manager it records what is submitted to the cache inside (and by torch); the plan
    that it is given there stands for those to come::

        with cache.capture(plan) as step:
            for layer in range(num_layers):
                cache.write_kv(layer, k[layer], v[layer], plan)
                cache.attend(layer, q[layer], plan, out=out[layer])
        step.replay(plan)

    Nothing runs before `replay`. Then it serves any plan of the cache of no more rows, however its
    sequences have grown, joined, left or forked; rows beyond the plan's are left as they are.

    Attributes:
        num_rows: rows that it was captured for.
    """

    def __init__(self, storage: "DeviceStorage", plan: Plan) -> None:
        """Prepare the capture of a step like this plan."""
        torch: Any = sys.modules["torch"]
        self.num_rows = plan.num_rows
        self._storage = storage
        self._plan = plan
        self._graph: Any = torch.cuda.CUDAGraph()
        with storage.submitting() as stream:
            state = TableState.of(storage.host, plan)
            self._image = storage.image_of(plan, state, stream)
            rows = plan.num_rows * state.num_qo_heads
            num_slots = _GROWTH * state.num_slots + _PER_ROW * rows
            num_slots += _PER_BLOCK * limits(storage.device).num_multiprocessors
            self._workspace = storage.workspace(state, num_slots, stream)
        self._contexts: list[Any] = []
        self._is_complete = False

    @property
    def positions(self) -> "torch.Tensor":
        """Each row's position in its sequence as of the last replay, int64 `[num_rows]`."""
        positions: torch.Tensor = self._image.positions[: self.num_rows]
        return positions

    @property
    def slot_mapping(self) -> "torch.Tensor":
        """Each row's slot as of the last replay, int64 `[num_rows]`; -1 for none."""
        slots: torch.Tensor = self._image.slot_mapping[: self.num_rows]
        return slots

    def __enter__(self) -> Self:
        """Begin to record."""
        if self._is_complete:
            raise KernelError("capture: got a step that is captured, allowed is a new one")
        torch: Any = sys.modules["torch"]
        device = torch.device("cuda", self._storage.device)
        capture = self._storage.capturing(self)
        capture.__enter__()
        try:
            graph = torch.cuda.graph(
                self._graph,
                stream=torch.cuda.Stream(device),
                # Kernels may be loaded meanwhile.
                capture_error_mode="relaxed",
            )
            graph.__enter__()
        except BaseException:
            capture.__exit__(None, None, None)
            raise
        self._contexts = [graph, capture]
        self._image.apply(int(torch.cuda.current_stream(device).cuda_stream))
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the record."""
        try:
            self._contexts[0].__exit__(exc_type, exc_value, traceback)
        finally:
            self._contexts[1].__exit__(exc_type, exc_value, traceback)
            self._contexts = []
        self._is_complete = exc_type is None

    def image_for(self, plan: Plan) -> DeviceImage:
        """Return the image that the step reads.

        Raises:
            InvalidConfigError: another plan than the one that is captured.
        """
        if plan is not self._plan:
            raise InvalidConfigError(
                "plan: got another one, allowed inside a capture is the plan that it was given"
            )
        return self._image

    def workspace_for(self, state: TableState) -> Workspace:
        """Return the workspace that the step uses.

        Raises:
            InvalidConfigError: another number of query heads than the plan was cut for.
        """
        if state.num_qo_heads != self._workspace.num_qo_heads:
            raise InvalidConfigError(
                f"q: got {state.num_qo_heads} heads, allowed inside this capture is"
                f" {self._workspace.num_qo_heads}: give ChunkCache num_qo_heads"
            )
        return self._workspace

    def replay(self, plan: Plan, stream: Any = None) -> None:
        """Run the step for a plan, which can only be committed or closed afterwards.

        Args:
            plan: an open plan of the cache, of up to `num_rows` rows.
            stream: a torch stream or a handle; torch's current stream if None.

        Raises:
            InvalidConfigError: a plan that the step cannot serve: more rows, or other heads, than
                it was captured for, or not one of this cache.
            StalePlanError: the plan is closed, or has been replayed.
            KernelError: nothing was captured; or the plan's tables or partial states have outgrown
                the capacity that it was captured for: capture a new step.
        """
        storage = self._storage
        if not self._is_complete:
            raise KernelError("replay: got a step without a capture, allowed is a captured one")
        with storage.submitting(stream) as handle:
            state = TableState.of(storage.host, plan)
            self._check(plan, state)
            self._image.send(storage.host, plan, state, handle)
            self._graph.replay()
            storage.host.release(plan)

    def _check(self, plan: Plan, state: TableState) -> None:
        if plan.num_rows > self.num_rows:
            raise InvalidConfigError(
                f"plan: got {plan.num_rows} rows, allowed is up to the {self.num_rows} that the"
                " step was captured for"
            )
        if state.num_qo_heads != self._workspace.num_qo_heads:
            raise InvalidConfigError(
                f"plan: got one for {state.num_qo_heads} query heads, allowed is the"
                f" {self._workspace.num_qo_heads} that the step was captured for"
            )
        if state.layout != self._image.layout:
            raise KernelError(
                "plan: got tables that have outgrown those of the captured step, allowed is what"
                " fits into them: capture a new step"
            )
        if state.num_slots > self._workspace.num_slots:
            raise KernelError(
                f"plan: got {state.num_slots} partial states, allowed is up to the"
                f" {self._workspace.num_slots} of the captured step: capture a new step"
            )
