"""Texts that callers give."""

from __future__ import annotations

from chunkcache.errors import InvalidConfigError

_MAX_SHOWN = 40


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
