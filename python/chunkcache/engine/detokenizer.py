"""Token ids to text, piece by piece, and the search for stop strings in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_REPLACEMENT = "\ufffd"
# A character has at most 4 bytes, a byte-level token at least one: what still does not decode
# after this many tokens never will.
_MAX_HELD_TOKENS = 16


class Detokenizer:
    """Turns a growing list of token ids into text that only grows.

    Characters whose bytes are spread over several tokens come out when they are complete. Bytes at
    the very end that never became a character are left out of the text.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        """Start with no tokens."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        # Tokens before `_read` are in the text; decoding from `_context` on, rather than from
        # `_read`, keeps the spaces that a tokenizer drops at the start of a text.
        self._context = 0
        self._read = 0

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is now certain, "" if none is."""
        self._ids.append(token_id)
        context = self._decode(self._context, self._read)
        text = self._decode(self._context, len(self._ids))
        held = len(self._ids) - self._read
        if text.endswith(_REPLACEMENT) and held < _MAX_HELD_TOKENS:
            return ""
        if len(text) <= len(context):
            return ""
        self._context, self._read = self._read, len(self._ids)
        return text[len(context) :]

    def finish(self) -> str:
        """Return the text still held back, without incomplete characters."""
        context = self._decode(self._context, self._read)
        text = self._decode(self._context, len(self._ids))
        self._context = self._read = len(self._ids)
        return text[len(context) :].rstrip(_REPLACEMENT)

    def _decode(self, begin: int, end: int) -> str:
        if begin == end:
            return ""
        text: str = self._tokenizer.decode(
            self._ids[begin:end],
            skip_special_tokens=self._skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return text


class StopStrings:
    """Ends a text before the first of some strings, wherever token borders fall.

    Text that may be the beginning of a stop string is held back until that is decided.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        """Start with an empty text."""
        self._strings = tuple(strings)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Add text and return what may be shown; `matched` is set when a stop string is found."""
        self._held += text
        found = [
            (position, -len(string), string)
            for string in self._strings
            if (position := self._held.find(string)) >= 0
        ]
        if found:
            position, _, self.matched = min(found)
            shown, self._held = self._held[:position], ""
            return shown
        keep = self._possible_beginning()
        shown, self._held = (
            self._held[: len(self._held) - keep],
            self._held[len(self._held) - keep :],
        )
        return shown

    def finish(self) -> str:
        """Return the text still held back."""
        shown, self._held = self._held, ""
        return shown

    def _possible_beginning(self) -> int:
        """Return the length of the longest end of the held text that begins a stop string."""
        longest = max((len(string) for string in self._strings), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-length:]
            if any(string.startswith(end) for string in self._strings):
                return length
        return 0
