"""Several LoRA adapters on one model, each request with its own or with none.

The tokens of a step stand in one packed row, so an adapter acts on ranges of it: while a step runs,
every module that an adapter changes adds ``scaling * B(A(x))`` to the rows of that adapter's
requests. The weights are what peft loads; the model's modules stay as they are. Needs the extra
``lora``: ``pip install 'chunkcache[lora]'``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from chunkcache.engine.attention import implementation
from chunkcache.errors import InvalidConfigError

_NUM_PROBED_TOKENS = 16
# Allowed max|logits - peft's| / max|peft's|.
_LIMITS = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 5e-2}
_RESERVED = "\0"
# A caller's name need not be one that a module can have.
_PEFT_NAME = "served"


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The rows ``[begin, end)`` of a step are of requests with the adapter ``name``."""

    name: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class _Delta:
    """What an adapter adds to one module: ``scaling * B(A(x))``.

    Of a module that is split over several processes each has its part: of B where the outputs are
    split, of A where the inputs are. A's outputs are added up then.

    Attributes:
        a: ``[rank, in_features]``.
        b: ``[out_features, rank]``.
        scaling: the factor.
        group: the processes that have the parts of A; None if this one has all of it.
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    group: Any = None

    @classmethod
    def of(cls, layer: Any) -> _Delta:
        """Take it from peft's layer, which splits what transformers has split."""
        a, b = (part[_PEFT_NAME].weight.detach() for part in (layer.lora_A, layer.lora_B))
        return cls(
            _own_part(a),
            _own_part(b),
            float(layer.scaling[_PEFT_NAME]),
            a.device_mesh.get_group() if isinstance(a, DTensor) else None,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return what to add for inputs ``[rows, in_features]``, in the weights' dtype."""
        linear = torch.nn.functional.linear
        inner = linear(x.to(self.a.dtype), self.a)
        if self.group is not None:
            dist.all_reduce(inner, group=self.group)
        return linear(inner, self.b) * self.scaling


def _own_part(weight: Any) -> torch.Tensor:
    part: torch.Tensor = weight.to_local() if isinstance(weight, DTensor) else weight
    return part.clone()


class Adapters:
    """The LoRA adapters of an engine."""

    def __init__(self, model: Any, paths: Mapping[str, str | Path]) -> None:
        """Load adapters for ``model``, and compare each with what peft makes of it.

        Args:
            model: a loaded model; it is left as it was.
            paths: a name for each adapter, and its folder as peft saves it.

        Raises:
            InvalidConfigError: an adapter does not fit the model or cannot be served.
            ModuleNotFoundError: the extra is missing.
        """
        self._model = model
        self._deltas: dict[str, dict[str, _Delta]] = {}
        if paths and find_spec("peft") is None:
            raise ModuleNotFoundError(
                "lora_adapters needs peft: pip install 'chunkcache[lora]'", name="peft"
            )
        tokens = torch.arange(_NUM_PROBED_TOKENS, device=model.device)
        tokens = (tokens * 37 + 1) % model.get_input_embeddings().weight.shape[0]
        for name, path in paths.items():
            self._deltas[name], expected = _load(model, name, Path(path), tokens)
            rows = AdapterRows(name, 0, len(tokens))
            self._check_served(name, self._served_logits(tokens, rows), expected)

    @property
    def names(self) -> list[str]:
        """The adapters' names."""
        return list(self._deltas)

    @contextmanager
    def applied(self, rows: Sequence[AdapterRows]) -> Iterator[None]:
        """Let the model add the adapters' parts to the given rows inside the context."""
        with ExitStack() as stack:
            changed = {path for part in rows for path in self._deltas[part.name]}
            for path in sorted(changed):
                parts = [
                    (part, delta)
                    for part in rows
                    if (delta := self._deltas[part.name].get(path)) is not None
                ]
                module = self._model.get_submodule(path)
                stack.enter_context(_Hook(module, parts))
            yield

    def _served_logits(self, tokens: torch.Tensor, rows: AdapterRows) -> torch.Tensor:
        with implementation(self._model, "eager"), self.applied([rows]):
            try:
                return _logits(self._model, tokens)
            except _RowsError as error:
                raise InvalidConfigError(_refusal(rows.name, str(error))) from error

    def _check_served(self, name: str, served: torch.Tensor, expected: torch.Tensor) -> None:
        error = float((served - expected).abs().max() / expected.abs().max())
        # A NaN is no match either.
        if not error <= _LIMITS[self._model.dtype]:
            reason = f"its logits are off by {error:.1e} of their size against peft's own"
            raise InvalidConfigError(_refusal(name, reason))


def namespace(cache_salt: str, lora: str | None) -> str:
    """Return the ``cache_salt`` that the prefix tree gets for requests of an adapter.

    No two pairs of arguments give the same, so that adapters never share with each other or with
    the bare model. Without an adapter it is the salt itself, unless that begins with a NUL.
    """
    if lora is not None:
        return f"{_RESERVED}lora {len(lora)} {lora}{cache_salt}"
    return f"{_RESERVED}base {cache_salt}" if cache_salt.startswith(_RESERVED) else cache_salt


class _RowsError(Exception):
    """A module does not get the step's rows one for one."""


class _Hook:
    """Adds the adapters' parts to a module's output, as long as the context lasts."""

    def __init__(self, module: Any, parts: Sequence[tuple[AdapterRows, _Delta]]) -> None:
        self._module = module
        self._parts = parts

    def __enter__(self) -> None:
        self._handle = self._module.register_forward_hook(self._add)

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _add(self, module: Any, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        x = args[0] if args else None
        end = max(part.end for part, _ in self._parts)
        if x is None or x.dim() != 3 or x.shape[0] != 1 or x.shape[1] < end:
            raise _RowsError(f"its {type(module).__name__} does not get one row for each token")
        result = output.clone()
        for part, delta in self._parts:
            rows = slice(part.begin, part.end)
            result[0, rows] = (output[0, rows] + delta(x[0, rows])).to(output.dtype)
        return result


def _load(
    model: Any, name: str, path: Path, tokens: torch.Tensor
) -> tuple[dict[str, _Delta], torch.Tensor]:
    """Load an adapter by peft; return it, and the logits that peft's model gives for ``tokens``."""
    import peft

    with warnings.catch_warnings(), _kept_as_it_is(model):
        # Of peft about transformers, and about missing weights, which are looked at here.
        warnings.simplefilter("ignore")
        try:
            config = peft.PeftConfig.from_pretrained(str(path))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InvalidConfigError(_refusal(name, f"{path}: {error}")) from error
        reason = _unserved_config(config)
        if reason is not None:
            raise InvalidConfigError(_refusal(name, reason))
        try:
            wrapped = peft.PeftModel(model, config, adapter_name=_PEFT_NAME)
        except (ValueError, RuntimeError, TypeError) as error:
            raise InvalidConfigError(_refusal(name, f"it does not fit: {error}")) from error
        reason = _load_weights(wrapped, path) or _unserved(wrapped)
        if reason is not None:
            raise InvalidConfigError(_refusal(name, reason))
        with implementation(model, "eager"):
            expected = _logits(wrapped, tokens)
        return _deltas(model), expected


def _unserved_config(config: Any) -> str | None:
    """Return what an adapter does beside adding to modules' outputs, if its settings tell."""
    import peft

    if config.peft_type != peft.PeftType.LORA:
        return f"it is of the kind {config.peft_type.value}, not LORA"
    if config.bias != "none":
        return "it replaces the model's biases"
    if config.layer_replication:
        return "it repeats layers of the model"
    return None


def _load_weights(wrapped: Any, path: Path) -> str | None:
    """Load the weights; return why not, if they do not fit."""
    try:
        result = wrapped.load_adapter(str(path), adapter_name=_PEFT_NAME)
    except (OSError, ValueError, RuntimeError) as error:
        return f"its weights do not fit: {error}"
    wrapped.eval()
    missing = [key for key in result.missing_keys if f".{_PEFT_NAME}." in f"{key}."]
    if missing or result.unexpected_keys:
        keys = ", ".join([*missing, *result.unexpected_keys][:3])
        return f"its weights do not fit the model: {keys}"
    return None


def _unserved(wrapped: Any) -> str | None:
    """Return which part of an adapter is more than two factors for a module, if one is."""
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    head = wrapped.get_base_model().get_output_embeddings()
    for path, module in wrapped.get_base_model().named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            return f"it replaces {path}"
        if isinstance(module, LoraLayer):
            if module is head:
                return f"it changes {path}, which is run on a few rows of a step only"
            if module.lora_variant:
                return f"it changes {path} by a variant of LoRA"
            if module.lora_embedding_A:
                return f"it changes the embedding {path}"
            if any(layer.bias is not None for layer in module.lora_B.values()):
                return f"it adds a bias to {path}"
            if not _is_split_alike(module):
                return f"it changes {path}, whose parts in the processes LoRA factors do not have"
    return None


def _is_split_alike(layer: Any) -> bool:
    """Tell whether peft has split an adapter's factors as transformers has the layer's weight."""
    weight = layer.get_base_layer().weight
    factors = [part[_PEFT_NAME].weight for part in (layer.lora_B, layer.lora_A)]
    wanted = [False, False]
    if isinstance(weight, DTensor):
        placement = weight.placements[-1]
        if type(placement) is not Shard:
            return bool(placement == Replicate())
        wanted[placement.dim % 2] = True
    return [isinstance(factor, DTensor) for factor in factors] == wanted


def _deltas(model: Any) -> dict[str, _Delta]:
    from peft.tuners.lora import LoraLayer

    layers: dict[str, Any] = {
        path: module for path, module in model.named_modules() if isinstance(module, LoraLayer)
    }
    return {path: _Delta.of(layer) for path, layer in layers.items()}


@contextmanager
def _kept_as_it_is(model: Any) -> Iterator[None]:
    """Take out again what peft puts into a model, wherever it stopped."""
    modules = [(module, dict(module._modules)) for module in model.modules()]
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    attributes = [(module, set(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, children in modules:
            module._modules.clear()
            module._modules.update(children)
        for parameter, requires_grad in trained:
            parameter.requires_grad_(requires_grad)
        for module, names in attributes:
            for name in set(vars(module)) - names:
                delattr(module, name)


def _logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=tokens[None], use_cache=False).logits
    return logits.double()


def _refusal(name: str, reason: str) -> str:
    return f"LoRA adapter {name!r} cannot be served: {reason}"
