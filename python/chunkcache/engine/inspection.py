"""What a Hugging Face model asks of its cache, and whether the engine can serve it at all.

The configuration names some features that cannot be served. The rest is read off one small forward
pass whose attention calls are recorded, so that no model's code or attribute names are relied on.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from chunkcache.engine.attention import AttentionCall, attending
from chunkcache.engine.config import ModelSpec
from chunkcache.errors import InvalidConfigError

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_SERVED_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
_ROW_BYTES = 16
_NUM_TRACED_TOKENS = 4
# Rotary scalings that turn on the length of the whole sequence: right only below that length.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def inspect_model(model: Any) -> ModelSpec:
    """Return what the engine needs to know of ``model``.

    Raises:
        InvalidConfigError: the model has a feature that the engine does not serve; the message
            names it.
    """
    reason = _refusal_by_config(model)
    if reason is None:
        calls = _trace(model)
        reason = _refusal_by_calls(model, calls)
    if reason is not None:
        raise refused(model, reason)
    config = model.config.get_text_config()
    query, key = calls[0].query, calls[0].key
    return ModelSpec(
        num_layers=len(calls),
        num_qo_heads=query[1],
        num_kv_heads=key[1],
        head_dim=key[3],
        dtype=_DTYPES[model.dtype],
        vocab_size=model.get_input_embeddings().weight.shape[0],
        max_model_len=_max_model_len(config),
        eos_token_ids=_eos_token_ids(model),
    )


def refused(model: Any, reason: str) -> InvalidConfigError:
    """Return the error for a model that cannot be served."""
    return InvalidConfigError(f"model {type(model).__name__} cannot be served: {reason}")


def accepts(model: Any, argument: str) -> bool:
    """Tell whether ``model``'s forward names ``argument``."""
    return argument in inspect.signature(type(model).forward).parameters


def _refusal_by_config(model: Any) -> str | None:
    config = model.config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or ()) | set(
        getattr(config, "layers_block_type", None) or ()
    )
    other_layers = sorted(layer_types - _SERVED_LAYER_TYPES)
    checks: list[tuple[bool, str]] = [
        (bool(getattr(model.config, "is_encoder_decoder", False)), "it is an encoder-decoder"),
        (
            getattr(config, "kv_lora_rank", None) is not None,
            "it uses multi-head latent attention (MLA)",
        ),
        (
            bool(getattr(config, "num_kv_shared_layers", 0)),
            "it has layers that share K/V with other layers",
        ),
        (
            bool(getattr(config, "alibi", False)) or config.model_type in ("bloom", "mpt"),
            "it uses attention with linear biases (ALiBi)",
        ),
        (bool(other_layers), f"it has layers of the kind {', '.join(map(str, other_layers))}"),
        (bool(getattr(model, "_is_stateful", False)), "it has recurrent layers"),
        (
            getattr(config, "use_bidirectional_attention", None) in (True, "all"),
            "its attention is not causal",
        ),
        (not accepts(model, "position_ids"), "its forward takes no position_ids"),
        (
            model.dtype not in _DTYPES,
            f"its weights are {model.dtype}; allowed is float32, bfloat16 or float16",
        ),
    ]
    return next((reason for found, reason in checks if found), None)


class _RecordedCall:
    """The shapes and parameters of one layer's attention call."""

    def __init__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> None:
        self.layer = call.layer
        self.query, self.key, self.value = query.shape, key.shape, value.shape
        self.call = call


def _trace(model: Any) -> list[_RecordedCall]:
    calls: list[_RecordedCall] = []

    def record(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        calls.append(_RecordedCall(query, key, value, call))
        batch, heads, tokens, _ = query.shape
        return query.new_zeros(batch, tokens, heads, value.shape[-1])

    positions = torch.arange(_NUM_TRACED_TOKENS, device=model.device)[None]
    try:
        with torch.inference_mode(), attending(model, record):
            model(
                input_ids=positions % model.get_input_embeddings().weight.shape[0],
                position_ids=positions,
                use_cache=False,
            )
    except Exception as error:
        # Whatever the model's own code raises here, the answer is that it cannot be served.
        raise refused(
            model, f"it does not run with a registered attention function: {error}"
        ) from error
    return calls


def _refusal_by_calls(model: Any, calls: list[_RecordedCall]) -> str | None:
    if not calls:
        return "it does not call its attention through transformers' AttentionInterface"
    layers = [call.layer for call in calls]
    if layers != list(range(len(calls))):
        return f"its attention layers are called in the order {layers}, not once each from 0 on"
    expected = model.config.get_text_config().num_hidden_layers
    if len(calls) != expected:
        return f"only {len(calls)} of its {expected} layers have standard attention"
    for recorded in calls:
        reason = _refusal_of_layer(recorded)
        if reason is not None:
            return f"{reason} (layer {recorded.layer})"
    shapes = {(call.query[1], call.key[1], call.key[3]) for call in calls}
    if len(shapes) > 1:
        return f"its layers differ in (query heads, K/V heads, head_dim): {sorted(shapes)}"
    row_bytes = calls[0].key[3] * model.dtype.itemsize
    if row_bytes % _ROW_BYTES:
        return (
            f"its head_dim of {calls[0].key[3]} makes rows of {row_bytes} bytes; "
            f"allowed is a multiple of {_ROW_BYTES}"
        )
    return None


def _refusal_of_layer(recorded: _RecordedCall) -> str | None:
    query, key, value = recorded.query, recorded.key, recorded.value
    call = recorded.call
    sinks = call.extra.get("s_aux")
    if sinks is not None or getattr(call.module, "sinks", None) is not None:
        return "it uses attention sinks"
    if call.extra.get("position_bias") is not None:
        return "its attention adds a position bias"
    if call.attention_mask is not None:
        return "it passes an attention mask of its own"
    if getattr(call.module, "is_causal", True) is False or call.extra.get("is_causal") is False:
        return "its attention is not causal"
    if key != value:
        return f"its K and V differ in shape: {tuple(key)} and {tuple(value)}"
    if query[2] != key[2]:
        return "its attention reads other tokens than those of the step"
    if query[3] != key[3] or query[1] % key[1]:
        return f"its queries {tuple(query)} do not go with its keys {tuple(key)}"
    return None


def _max_model_len(config: Any) -> int | None:
    limit: Any = getattr(config, "max_position_embeddings", None)
    for rope in _rope_parameters(config):
        if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            original = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", limit
            )
            limit = original if limit is None else min(limit, original)
    return None if limit is None else int(limit)


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    parameters = getattr(config, "rope_parameters", None) or {}
    # One dictionary, or one for each type of layer.
    if "rope_type" in parameters:
        return [parameters]
    return [value for value in parameters.values() if isinstance(value, dict)]


def _eos_token_ids(model: Any) -> frozenset[int]:
    generation = getattr(model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    if ids is None:
        ids = model.config.get_text_config().eos_token_id
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)
