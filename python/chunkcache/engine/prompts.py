"""The forms in which prompts may come, made into token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from chunkcache import _core
from chunkcache.engine.texts import check_text
from chunkcache.errors import InvalidConfigError

Message: TypeAlias = Mapping[str, Any]
"""A chat message: "role" and "content", as chat templates expect them."""

Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]
"""One prompt: a text, its token ids, or the messages of a chat."""

_ALLOWED = "a text, a list of token ids, a list of chat messages, or a list of those"


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt as the engine takes it.

    Attributes:
        text: None if it came as token ids.
        token_ids: its tokens.
        array: the same, uint32 ``[tokens]``, where that is at hand.
    """

    text: str | None
    token_ids: list[int]
    array: npt.NDArray[np.uint32] | None = field(default=None, repr=False, compare=False)


def tokenize(prompts: Any, tokenizer: Any | None, vocab_size: int) -> list[TokenizedPrompt]:
    """Return ``prompts``, one or many, as token ids.

    Raises:
        InvalidConfigError: a prompt is empty or of another form, a token id is outside the
            vocabulary, or a text or chat comes without a tokenizer or a chat template.
    """
    prompts = _without_arrays(prompts)
    many = prompts if _is_many(prompts) else [prompts]
    return [_tokenize_one(prompt, i, tokenizer, vocab_size) for i, prompt in enumerate(many)]


#: The kinds of parts that one prompt has: token ids or messages.
_ITEMS = (int, np.integer, Mapping)


def _without_arrays(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.ndarray, torch.Tensor)) else value


def _is_many(prompts: Any) -> bool:
    if isinstance(prompts, str):
        return False
    if not _is_list(prompts):
        raise InvalidConfigError(f"prompts is a {type(prompts).__name__}; allowed is {_ALLOWED}")
    return len(prompts) == 0 or not _is_item(prompts[0])


def _is_list(value: Any) -> bool:
    """Tell whether ``value`` is a sequence, and not of bytes, which are no token ids."""
    return isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview))


def _is_item(value: Any) -> bool:
    """Tell whether ``value`` is a part of one prompt: a token id or a message."""
    return isinstance(value, _ITEMS)


def _tokenize_one(
    prompt: Any, index: int, tokenizer: Any | None, vocab_size: int
) -> TokenizedPrompt:
    name = f"prompt {index}"
    prompt = _without_arrays(prompt)
    text: str | None = None
    array: npt.NDArray[np.uint32] | None = None
    # One by one in Python costs as much as a step of the model, for many long prompts in the cache.
    if isinstance(prompt, str):
        text = prompt
        token_ids = _encode(text, tokenizer, name, add_special_tokens=True)
    elif isinstance(prompt, list) and (ids := _core.token_array(prompt, vocab_size)) is not None:
        token_ids, array = list(prompt), ids
    elif _is_list(prompt) and all(issubclass(kind, _ITEMS) for kind in set(map(type, prompt))):
        if prompt and isinstance(prompt[0], Mapping):
            text = _render_chat(prompt, tokenizer, name)
            token_ids = _encode(text, tokenizer, name, add_special_tokens=False)
        else:
            token_ids = _check_ids(prompt, vocab_size, name)
    else:
        raise InvalidConfigError(f"{name} is a {type(prompt).__name__}; allowed is {_ALLOWED}")
    if not token_ids:
        raise InvalidConfigError(f"{name} is empty; allowed is at least one token")
    return TokenizedPrompt(text, token_ids, array)


def _check_ids(prompt: Any, vocab_size: int, name: str) -> list[int]:
    token_ids = []
    for token in prompt:
        if isinstance(token, (bool, Mapping)) or not 0 <= token < vocab_size:
            raise InvalidConfigError(
                f"{name} has the token id {token!r}; allowed is an int in [0, {vocab_size})"
            )
        token_ids.append(int(token))
    return token_ids


def _encode(text: str, tokenizer: Any | None, name: str, *, add_special_tokens: bool) -> list[int]:
    if tokenizer is None:
        raise InvalidConfigError(f"{name} is text, but there is no tokenizer; allowed is token ids")
    check_text(name, text)
    encoded = tokenizer(text, add_special_tokens=add_special_tokens)
    return [int(token) for token in encoded["input_ids"]]


def _render_chat(messages: Any, tokenizer: Any | None, name: str) -> str:
    if tokenizer is None or getattr(tokenizer, "chat_template", None) is None:
        raise InvalidConfigError(
            f"{name} is a chat, but the tokenizer has no chat template; "
            "allowed is a text or token ids"
        )
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise InvalidConfigError(
                f"{name} has the message {message!r}; allowed is a mapping with role and content"
            )
    try:
        rendered: str = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=False
        )
    except Exception as error:  # Whatever a template's own code raises.
        raise InvalidConfigError(
            f"{name} is a chat that the tokenizer's chat template does not take: {error}"
        ) from error
    return rendered
