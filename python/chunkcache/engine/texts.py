"""Texts that callers give, and values in the text of messages."""

from __future__ import annotations

from typing import Any

from chunkcache.errors import InvalidConfigError

_MAX_SHOWN = 40


def shown(value: Any) -> str:
    """Return a value as messages show it, by its type if it has an int too long to be written."""
    try:
        return repr(value)
    except ValueError:
        return f"an object of type {type(value).__name__} too long to be shown"


def check_text(name: str, text: str) -> None:
    """Check that a text is Unicode: a Python str may have halves of characters in it.

    Raises:
        InvalidConfigError: it has.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        place = text[max(0, error.start - _MAX_SHOWN // 2) :][:_MAX_SHOWN]
        raise InvalidConfigError(
            f"{name} has {place!r}; allowed is text without lone surrogates"
        ) from error
