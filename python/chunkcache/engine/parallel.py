"""One model over several processes: each has a part of every layer, and K/V of its own heads.

transformers splits the weights by the model's ``tp_plan``. Every process runs the same engine over
the same requests (`chunkcache.engine.lockstep`), and so plans the same steps; the first process
picks the tokens for all, lest rounding errors make them disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from chunkcache.engine.config import EngineConfig, ModelSpec
from chunkcache.engine.executor import Picker, Runner
from chunkcache.engine.logprobs import Logprob
from chunkcache.engine.picker import Pick, Picked
from chunkcache.engine.processes import FIRST, Processes, environment_int
from chunkcache.engine.runner import StepInput
from chunkcache.errors import ChunkCacheError, InvalidConfigError

_Extras: TypeAlias = tuple[list[dict[int, Logprob] | None], dict[int, str], set[int]]


def place_of_process(device: Any, size: int) -> torch.device:
    """Return where this process's part of a model goes: its own CUDA device, if there are any.

    Args:
        device: what the caller asks for, None for whatever there is.
        size: number of processes.

    Raises:
        InvalidConfigError: ``device`` is another kind, or one particular device; or there is no
            device for this process.
    """
    # transformers takes an accelerator wherever there is one.
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if device is not None and str(device) != kind:
        raise InvalidConfigError(
            f"device is {str(device)!r}; allowed with tensor_parallel_size {size} on this machine "
            f"is {kind!r}, of which each process takes its own"
        )
    if kind == "cpu":
        return torch.device("cpu")
    last = torch.cuda.device_count() - 1
    return torch.device("cuda", environment_int("LOCAL_RANK", 0, last, default=0))


def check_heads(config: Any, size: int) -> None:
    """Check that the heads of a model can be split.

    Args:
        config: the model's text configuration.
        size: number of processes.

    Raises:
        InvalidConfigError: they cannot.
    """
    num_qo_heads = getattr(config, "num_attention_heads", size)
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_qo_heads
    if num_qo_heads % size or num_kv_heads % size:
        raise InvalidConfigError(
            f"tensor_parallel_size is {size}; allowed for this model is what divides its "
            f"{num_qo_heads} query heads and {num_kv_heads} K/V heads"
        )


def check_split(model: Any, spec: ModelSpec, size: int) -> None:
    """Check that a loaded model has been split by its heads.

    Raises:
        InvalidConfigError: its plan splits something else, or there is none.
    """
    config = model.config.get_text_config()
    num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if spec.num_kv_heads * size != num_kv_heads:
        raise InvalidConfigError(
            f"tensor_parallel_size is {size}, but transformers' tp_plan for {type(model).__name__} "
            f"leaves {spec.num_kv_heads} of {num_kv_heads} K/V heads to each process; "
            f"allowed is 1 for this model"
        )


def check_options(config: EngineConfig) -> None:
    """Check that an engine's options are what a split model can be served with.

    Raises:
        InvalidConfigError: they are not.
    """
    split = f"with tensor_parallel_size {config.tensor_parallel_size}"
    if config.compile_model:
        raise InvalidConfigError(f"compile_model is True; allowed {split} is False")
    for name in ("k_scale", "v_scale"):
        scale = getattr(config, name)
        if scale is not None and not isinstance(scale, int | float):
            raise InvalidConfigError(
                f"{name} is a {type(scale).__name__}; allowed {split} is None or a number"
            )


def load_arguments(size: int) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` that split a model over ``size`` processes.

    Raises:
        InvalidConfigError: transformers is too old.
    """
    from transformers.distributed.configuration_utils import DistributedConfig

    try:
        return {"distributed_config": DistributedConfig(tp_size=size, tp_plan="auto")}
    except TypeError as error:
        raise InvalidConfigError(
            f"tensor_parallel_size is {size}; allowed with this release of transformers is 1"
        ) from error


def described(model: Any, tokenizer: Any | None) -> dict[str, str]:
    """Return what has to be the same in all processes of a model; not where its files are."""
    config = {**model.config.to_diff_dict(), "_name_or_path": None}
    words = None if tokenizer is None else len(tokenizer)
    return {"model": f"{type(model).__name__} {config}", "tokenizer": f"of {words} tokens"}


def group_of(model: Any) -> Any:
    """Return the process group over which the layers of a split model add up their parts."""
    parts = (part for part in model.parameters() if isinstance(part, DTensor))
    return next(parts).device_mesh.get_group()


def break_off(model: Any) -> Callable[[], None] | None:
    """Return what ends collectives of a split model that wait for a process that is lost.

    It does not keep the model alive. None for those of gloo: they end when that process does, and
    nobody waits for them.
    """
    if model.device.type != "cuda":
        return None
    group, device = group_of(model), model.device
    return lambda: group._get_backend(device).abort()


class SharedRunner:
    """A runner whose failure the other processes are told of, which would wait for it."""

    def __init__(self, runner: Runner, processes: Processes) -> None:
        """Run by ``runner``."""
        self._runner = runner
        self._processes = processes

    @property
    def device(self) -> torch.device:
        """Where token ids are expected."""
        return self._runner.device

    def run(self, step: StepInput) -> torch.Tensor:
        """Compute this process's part of a step; see `ModelRunner.run`."""
        with self._processes.reporting("the model step"):
            return self._runner.run(step)


class SharedPicker:
    """A picker whose picks are those of the first process in all of them."""

    def __init__(self, picker: Picker, processes: Processes, group: Any) -> None:
        """Pick by ``picker`` in the first process, and hand out the picks over ``group``."""
        self._picker = picker
        self._processes = processes
        self._group = group

    def pick(self, logits: torch.Tensor, picks: Sequence[Pick]) -> Picked:
        """Pick a token for each of ``picks``; see `TokenPicker.pick`."""
        with self._processes.reporting("picking"):
            # The tokens, and whether something else follows.
            shared = torch.zeros(len(picks) + 1, dtype=torch.int64, device=logits.device)
            if self._processes.is_first:
                return self._send(self._picker.pick(logits, picks), shared)
            states = [pick.state for pick in picks]
            # What may fail, or tell more than a token, is what is picked on the host.
            is_plain = all(s.takes_best or (logits.is_cuda and s.only_draws) for s in states)
            return self._receive(shared, is_plain)

    def _send(self, picked: Picked, shared: torch.Tensor) -> Picked:
        errors = {index: str(error) for index, error in picked.errors.items()}
        has_extras = bool(errors or picked.completes or any(picked.logprobs))
        shared[:-1] = picked.tokens
        shared[-1] = has_extras
        dist.broadcast(shared, group=self._group, group_src=FIRST)
        if has_extras:
            self._hand_out((picked.logprobs, errors, picked.completes), shared.device)
        return picked

    def _receive(self, shared: torch.Tensor, is_plain: bool) -> Picked:
        dist.broadcast(shared, group=self._group, group_src=FIRST)
        tokens = shared[:-1]
        # Where nothing can follow, nothing waits for the device.
        if is_plain or not int(shared[-1]):
            return Picked(tokens, [None] * len(tokens))
        logprobs, errors, completes = self._hand_out(None, shared.device)
        failures: dict[int, Exception] = {
            index: ChunkCacheError(message) for index, message in errors.items()
        }
        return Picked(tokens, logprobs, failures, completes)

    def _hand_out(self, extras: _Extras | None, device: torch.device) -> Any:
        objects = [extras]
        dist.broadcast_object_list(objects, group=self._group, group_src=FIRST, device=device)
        return objects[0]
