"""One model over several processes: each has a part of every layer, and K/V of its own heads.

transformers splits the weights by the model's ``tp_plan``. Every process runs the same engine over
the same requests, and so plans the same steps; the first process picks the tokens for all. Only
then do rounding errors, which may differ between processes, not make them disagree.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from chunkcache.engine.config import ModelSpec
from chunkcache.engine.logprobs import Logprob
from chunkcache.engine.picker import Pick, Picked
from chunkcache.errors import ChunkCacheError, InvalidConfigError

_FIRST = 0
# What stands after the tokens that are broadcast.
_PLAIN, _WITH_EXTRAS, _FAILED = range(3)

_Extras = tuple[list[dict[int, Logprob] | None], dict[int, str], set[int]]


class _Picker(Protocol):
    def pick(self, logits: torch.Tensor, picks: Sequence[Pick]) -> Picked: ...


def check_processes(size: int) -> None:
    """Check that there are ``size`` processes.

    Raises:
        InvalidConfigError: there are more or fewer.
    """
    started = dist.is_available() and dist.is_initialized()
    number = dist.get_world_size() if started else int(os.environ.get("WORLD_SIZE", "1"))
    if number != size:
        raise InvalidConfigError(
            f"tensor_parallel_size is {size}, but there is a process group of {number}; start the "
            f"program as {size} processes: torchrun --nproc-per-node {size}"
        )


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


def smallest(number: int, device: torch.device) -> int:
    """Return the smallest of the numbers that the processes give."""
    shared = torch.tensor([number], device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MIN)
    return int(shared)


class SharedPicker:
    """A picker whose picks are those of the first process in all of them."""

    def __init__(self, picker: _Picker) -> None:
        """Pick by ``picker`` in the first process."""
        self._picker = picker
        self._is_first = dist.get_rank() == _FIRST

    def pick(self, logits: torch.Tensor, picks: Sequence[Pick]) -> Picked:
        """Pick a token for each of ``picks``; see `TokenPicker.pick`.

        Raises:
            ChunkCacheError: picking failed in the first process.
        """
        shared = torch.zeros(len(picks) + 1, dtype=torch.int64, device=logits.device)
        if not self._is_first:
            return self._receive(shared)
        try:
            picked = self._picker.pick(logits, picks)
        except BaseException as error:
            shared[-1] = _FAILED
            self._send(shared, str(error))
            raise
        shared[:-1] = picked.tokens
        errors = {index: str(error) for index, error in picked.errors.items()}
        extras: _Extras = (picked.logprobs, errors, picked.completes)
        has_extras = bool(errors or picked.completes or any(picked.logprobs))
        shared[-1] = _WITH_EXTRAS if has_extras else _PLAIN
        self._send(shared, extras if has_extras else None)
        return picked

    def _send(self, shared: torch.Tensor, extras: _Extras | str | None) -> None:
        dist.broadcast(shared, _FIRST)
        if extras is not None:
            dist.broadcast_object_list([extras], _FIRST, device=shared.device)

    def _receive(self, shared: torch.Tensor) -> Picked:
        dist.broadcast(shared, _FIRST)
        kind, tokens = int(shared[-1]), shared[:-1]
        if kind == _PLAIN:
            return Picked(tokens, [None] * len(tokens))
        objects: list[Any] = [None]
        dist.broadcast_object_list(objects, _FIRST, device=shared.device)
        if kind == _FAILED:
            raise ChunkCacheError(f"picking failed in the first process: {objects[0]}")
        logprobs, errors, completes = objects[0]
        failures: dict[int, Exception] = {
            index: ChunkCacheError(message) for index, message in errors.items()
        }
        return Picked(tokens, logprobs, failures, completes)
