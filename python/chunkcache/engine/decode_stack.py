"""What a decode step computes of models built as Llama is, found in the model's modules.

Such a model is embeddings, layers of RMS norm, attention with rotated halves, RMS norm and a gated
SiLU, a last norm and a head. Mistral, Qwen 2 and 3 and many others are built so, under their own
names; others look alike and differ in a factor. So what is found is told by its form first, and
then by what it computes: a model counts only if each of its layers adds the same to what it gets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from chunkcache.engine.attention import AttentionCall, attending

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj"}
_EPSILONS = ("variance_epsilon", "eps", "epsilon")
#: Kinds of rotation whose angles depend on the position alone.
_FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")
_TABLE_PIECE = 4096
_NUM_CHECKED = 6
#: Largest difference between what a layer adds to a row, or the row's logits, computed both ways,
#: over the largest value: a few roundings, since the two differ in where they round.
_LIMITS = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
#: The same for the sum of that and the row itself, in units in the last place.
_SUM_ROUNDINGS = 3


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm: its weight ``[width]`` and what is added to the mean square."""

    weight: torch.Tensor
    epsilon: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer.

    Attributes:
        qkv: weights of q, k and v, ``[heads * head_dim, width]``.
        biases: what is added to them, None for nothing.
        head_norms: norms of the heads of q and k, None for none.
        output: weight of the attention's output, ``[width, num_qo_heads * head_dim]``.
        gate_up: weights of the gate and of what it lets through, ``[inner, width]``.
        down: weight ``[width, inner]``.
        input_norm: before the attention.
        inner_norm: before the gate.
        call: how the layer attends.
    """

    qkv: tuple[torch.Tensor, ...]
    biases: tuple[torch.Tensor | None, ...]
    head_norms: tuple[Norm, Norm] | None
    output: torch.Tensor
    gate_up: tuple[torch.Tensor, ...]
    down: torch.Tensor
    input_norm: Norm
    inner_norm: Norm
    call: AttentionCall


@dataclass(frozen=True, slots=True)
class DecodeStack:
    """A model as its parts; the tensors are the model's own.

    Attributes:
        embedding: ``[vocab_size, width]``.
        layers: one after the other, all of the same sizes.
        norm: after the last.
        head: ``[vocab_size, width]``.
        head_dim: columns of a head.
        cosine: of each position, float32 ``[positions, head_dim / 2]``.
        sine: likewise.
    """

    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    norm: Norm
    head: torch.Tensor
    head_dim: int
    cosine: torch.Tensor
    sine: torch.Tensor

    def layer_output(
        self, layer: Layer, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Compute a layer in plain operations.

        Args:
            layer: one of ``layers``.
            hidden: ``[rows, width]``.
            positions: int64 ``[rows]``.
            attend: gets q, k and v ``[rows, heads, head_dim]`` and returns the attention of q.

        Returns:
            ``[rows, width]``.
        """
        linear = nn.functional.linear
        x = layer.input_norm(hidden)
        q, k, v = (
            linear(x, weight, bias).view(len(x), -1, self.head_dim)
            for weight, bias in zip(layer.qkv, layer.biases, strict=True)
        )
        if layer.head_norms is not None:
            q, k = layer.head_norms[0](q), layer.head_norms[1](k)
        attended = attend(self._rotated(q, positions), self._rotated(k, positions), v)
        hidden = hidden + linear(attended.flatten(1), layer.output)
        gate, up = (linear(layer.inner_norm(hidden), weight) for weight in layer.gate_up)
        return hidden + linear(nn.functional.silu(gate) * up, layer.down)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the logits ``[rows, vocab_size]`` of what the last layer gives."""
        return nn.functional.linear(self.norm(hidden), self.head)

    def _rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        low, high = x.float().chunk(2, dim=-1)
        cosine, sine = (table[positions][:, None] for table in (self.cosine, self.sine))
        turned = (low * cosine - high * sine, high * cosine + low * sine)
        return torch.cat(turned, dim=-1).to(x.dtype)


def find_stack(model: Any, num_positions: int) -> DecodeStack | None:
    """Return the parts of a model that is built as Llama is, None if it is not.

    Args:
        model: a loaded model.
        num_positions: how many positions its sequences have.
    """
    with torch.inference_mode():
        stack = _found(model, num_positions)
        return stack if stack is not None and _computes_the_same(model, stack) else None


def _found(model: Any, num_positions: int) -> DecodeStack | None:
    inner: Any = getattr(model, "model", None)
    names = ("embed_tokens", "layers", "norm", "rotary_emb")
    is_split = (getattr(model, "tp_size", None) or 1) > 1
    if not all(hasattr(inner, name) for name in names) or is_split or _is_hooked(model):
        return None
    head = model.get_output_embeddings()
    norm = _norm(inner.norm)
    if type(inner.embed_tokens) is not nn.Embedding or not _is_plain(head) or norm is None:
        return None
    parts = [_layer_parts(layer) for layer in inner.layers]
    if not parts or None in parts:
        return None
    head_dim = getattr(inner.layers[0].self_attn, "head_dim", 0)
    rotation = _rotation(inner.rotary_emb, num_positions, head_dim, model.device)
    calls = _calls(model)
    if rotation is None or len(calls) != len(parts):
        return None
    layers = tuple(
        Layer(**part, call=call) for part, call in zip(parts, calls, strict=True) if part
    )
    if len({_sizes(layer) for layer in layers}) > 1:
        return None
    return DecodeStack(inner.embed_tokens.weight, layers, norm, head.weight, head_dim, *rotation)


def _sizes(layer: Layer) -> tuple[Any, ...]:
    weights = (*layer.qkv, layer.output, *layer.gate_up, layer.down)
    return (layer.head_norms is None, *((w.shape, w.dtype) for w in weights))


def _is_hooked(model: Any) -> bool:
    """Tell whether something comes between the modules, such as the splitting of a model."""
    return any(
        module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
        for module in model.modules()
    )


def _is_plain(module: Any, *, with_bias: bool = False) -> bool:
    return (
        type(module) is nn.Linear
        and (with_bias or module.bias is None)
        and type(module.weight) is nn.Parameter
        and module.weight.is_contiguous()
    )


def _norm(module: Any) -> Norm | None:
    weight = getattr(module, "weight", None)
    epsilon = next((e for n in _EPSILONS if isinstance(e := getattr(module, n, None), float)), None)
    if weight is None or weight.dim() != 1 or epsilon is None:
        return None
    return Norm(weight, epsilon)


def _children(module: Any) -> set[str]:
    return {name for name, child in module.named_children() if list(child.parameters())}


def _layer_parts(layer: Any) -> dict[str, Any] | None:
    if _children(layer) != _LAYER:
        return None
    attention, mlp = layer.self_attn, layer.mlp
    has_norms = _children(attention) == _ATTENTION | _HEAD_NORMS
    if not (has_norms or _children(attention) == _ATTENTION) or _children(mlp) != _MLP:
        return None
    qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
    others = (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    if not all(_is_plain(module, with_bias=True) for module in qkv):
        return None
    norms = [_norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)]
    head_norms = [_norm(attention.q_norm), _norm(attention.k_norm)] if has_norms else []
    if not all(map(_is_plain, others)) or None in norms or None in head_norms:
        return None
    if not _is_silu(getattr(mlp, "act_fn", None)):
        return None
    return {
        "qkv": tuple(module.weight for module in qkv),
        "biases": tuple(module.bias for module in qkv),
        "head_norms": tuple(head_norms) or None,
        "output": attention.o_proj.weight,
        "gate_up": (mlp.gate_proj.weight, mlp.up_proj.weight),
        "down": mlp.down_proj.weight,
        "input_norm": norms[0],
        "inner_norm": norms[1],
    }


def _is_silu(function: Any) -> bool:
    # By values: a small model's gates stay where all usual functions are alike.
    x = torch.linspace(-8, 8, 65)
    return callable(function) and torch.allclose(function(x), nn.functional.silu(x), atol=1e-5)


def _rotation(
    module: Any, num_positions: int, head_dim: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Tabulate a rotary embedding; None if it does not turn all columns by fixed angles."""
    if getattr(module, "rope_type", None) not in _FIXED_ROTATIONS:
        return None
    like = torch.empty(1, dtype=torch.float32, device=device)
    tables: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for begin in range(0, num_positions, _TABLE_PIECE):
        end = min(begin + _TABLE_PIECE, num_positions)
        for table, piece in zip(
            tables, module(like, torch.arange(begin, end, device=device)[None]), strict=True
        ):
            if piece.shape != (1, end - begin, head_dim):
                return None
            table.append(piece[0, :, : head_dim // 2].contiguous())
    return torch.cat(tables[0]), torch.cat(tables[1])


def _mixed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Stand in for attention: something that depends on every value of q, k and v."""
    group = q.shape[1] // k.shape[1]
    return (q + (k + 2 * v).repeat_interleave(group, dim=1)) / 4


def _calls(model: Any) -> list[AttentionCall]:
    """Return how each layer attends."""
    calls: list[AttentionCall] = []

    def note(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        calls.append(call)
        return _mixed(query, key, value).transpose(1, 2)

    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with attending(model, note):
        model(input_ids=token, position_ids=token, use_cache=False)
    return calls if [call.layer for call in calls] == list(range(len(calls))) else []


def _computes_the_same(model: Any, stack: DecodeStack) -> bool:
    numbers = torch.arange(_NUM_CHECKED, device=model.device)
    token_ids = (numbers * 7919 + 1) % len(stack.embedding)
    positions = (numbers * (len(stack.cosine) - 1)) // (_NUM_CHECKED - 1)
    passed, logits = _passed_between_layers(model, token_ids, positions)
    if len(passed) != len(stack.layers) + 1 or not torch.equal(
        passed[0], stack.embedding[token_ids]
    ):
        return False
    return all(
        _is_near(stack.layer_output(layer, given, positions, _mixed), expected, given)
        for layer, given, expected in zip(stack.layers, passed[:-1], passed[1:], strict=True)
    ) and _is_near(stack.logits(passed[-1]), logits)


def _passed_between_layers(
    model: Any, token_ids: torch.Tensor, positions: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Run a model; return what each layer gets and the last one gives, and the logits."""
    passed: list[torch.Tensor] = []

    def note_input(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        passed.append((args[0] if args else kwargs["hidden_states"])[0])

    def note_output(_: Any, __: Any, output: Any) -> None:
        passed.append((output[0] if isinstance(output, tuple) else output)[0])

    def mixed(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        return _mixed(query, key, value).transpose(1, 2)

    layers = model.model.layers
    hooks = [layer.register_forward_pre_hook(note_input, with_kwargs=True) for layer in layers]
    hooks.append(layers[-1].register_forward_hook(note_output))
    try:
        with attending(model, mixed):
            output = model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return passed, output.logits[0]


def _is_near(
    found: torch.Tensor, expected: torch.Tensor, before: torch.Tensor | None = None
) -> bool:
    """Compare rows, as far as they differ from what they were ``before``."""
    added = (expected if before is None else expected - before).float()
    allowed = _LIMITS[expected.dtype] * added.abs().amax(dim=1, keepdim=True)
    if before is not None:
        unit = torch.finfo(expected.dtype).eps
        allowed = allowed + _SUM_ROUNDINGS * unit * expected.float().abs()
    # A NaN is not near.
    return bool(((found - expected).float().abs() <= allowed).all())
