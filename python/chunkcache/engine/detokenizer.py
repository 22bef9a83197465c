"""Token ids to text, piece by piece, and the search for stop strings in it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerFast

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
        self._decode = _decoder_of(tokenizer, skip_special_tokens)
        self._ids: list[int] = []
        # Tokens before `_read` are in the text; decoding from `_context` on, rather than from
        # `_read`, keeps the spaces that a tokenizer drops at the start of a text.
        self._context = 0
        self._read = 0
        # Characters of the tokens from `_read` on that are in the text already.
        self._num_shown = 0

    def push(self, *token_ids: int) -> str:
        """Add tokens and return the text that is now certain, "" if none is.

        All at once or one by one, they make the same text.
        """
        if len(token_ids) == 1:
            return self._push(token_ids[0])
        known = len(self._ids)
        self._ids += token_ids
        begin, text = self._undecided()
        if len(text) > begin and _REPLACEMENT not in text:
            return self._take(begin, text)
        # Which broken characters are shown depends on the tokens before which they stood last.
        del self._ids[known:]
        return "".join(map(self._push, token_ids))

    def _push(self, token_id: int) -> str:
        self._ids.append(token_id)
        begin, text = self._undecided()
        held = len(self._ids) - self._read
        if text.endswith(_REPLACEMENT) and held < _MAX_HELD_TOKENS:
            # What stands before the character that is not complete is certain.
            certain = text.rstrip(_REPLACEMENT)[begin:]
            self._num_shown += len(certain)
            return certain
        return self._take(begin, text) if len(text) > begin else ""

    def finish(self) -> str:
        """Return the text still held back, without incomplete characters."""
        begin, text = self._undecided()
        return self._take(begin, text).rstrip(_REPLACEMENT)

    def _undecided(self) -> tuple[int, str]:
        """Return the text from `_context` on, and where in it that begins which was not shown."""
        context = self._decode(self._ids[self._context : self._read])
        text = self._decode(self._ids[self._context :])
        return len(context) + self._num_shown, text

    def _take(self, begin: int, text: str) -> str:
        """Count all tokens as shown; the last ones that were read are the next ones' context."""
        self._context, self._read, self._num_shown = self._read, len(self._ids), 0
        return text[begin:]


class _Decoder:
    """Decodes token ids as one tokenizer does, again and again."""

    def __init__(self, tokenizer: Any, skip_special_tokens: bool) -> None:
        """Take the backend's own function, where transformers adds nothing to it but time."""
        kind = type(tokenizer)
        if all(
            getattr(kind, name, None) is getattr(PreTrainedTokenizerFast, name)
            for name in ("decode", "_decode", "backend_tokenizer")
        ):
            self._decode = partial(
                tokenizer.backend_tokenizer.decode, skip_special_tokens=skip_special_tokens
            )
        else:
            self._decode = partial(
                tokenizer.decode,
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        #: The texts of single tokens: most often one token is the context of the next.
        self._texts: dict[int, str] = {}

    def __call__(self, token_ids: list[int]) -> str:
        """Return the text of ``token_ids``."""
        if len(token_ids) > 1:
            text: str = self._decode(token_ids)
            return text
        if not token_ids:
            return ""
        token = token_ids[0]
        if token not in self._texts:
            self._texts[token] = self._decode(token_ids)
        return self._texts[token]


_decoders: WeakKeyDictionary[Any, dict[bool, _Decoder]] = WeakKeyDictionary()


def _decoder_of(tokenizer: Any, skip_special_tokens: bool) -> _Decoder:
    """Return the decoder that all texts of a tokenizer use."""
    made = _decoders.setdefault(tokenizer, {})
    if skip_special_tokens not in made:
        made[skip_special_tokens] = _Decoder(tokenizer, skip_special_tokens)
    return made[skip_special_tokens]


class StopStrings:
    """Ends a text at the first of some strings, wherever token borders fall.

    The first is the one that is complete first, and the longest of those that end together. Text
    that may be the beginning of a stop string is held back until that is decided.
    """

    def __init__(self, strings: Sequence[str], *, include: bool = False) -> None:
        """Start with an empty text.

        Args:
            strings: what ends the text.
            include: end the text after the string, not before it.
        """
        self._strings = tuple(strings)
        self._include = include
        self._held = ""
        # A string that is complete within these first characters of `_held` does not count.
        self._num_exempt = 0
        self.matched: str | None = None

    def push(self, text: str, *, counts: bool = True) -> str:
        """Add text and return what may be shown; `matched` is set when a stop string is found.

        Args:
            text: the next piece.
            counts: whether a stop string that is complete in this piece ends the text.
        """
        if not self._strings:
            return text
        self._held += text
        if not counts:
            self._num_exempt = len(self._held)
        found = min(filter(None, map(self._find, self._strings)), default=None)
        if found is not None:
            end, begin = found
            self.matched = self._held[begin:end]
            shown, self._held = self._held[: end if self._include else begin], ""
            return shown
        num_shown = len(self._held) - self._possible_beginning()
        shown, self._held = self._held[:num_shown], self._held[num_shown:]
        self._num_exempt = max(0, self._num_exempt - num_shown)
        return shown

    def finish(self) -> str:
        """Return the text still held back."""
        shown, self._held = self._held, ""
        return shown

    def _find(self, string: str) -> tuple[int, int] | None:
        """Return end and beginning of the first place of ``string`` that counts."""
        begin = self._held.find(string, max(0, self._num_exempt - len(string) + 1))
        return (begin + len(string), begin) if begin >= 0 else None

    def _possible_beginning(self) -> int:
        """Return the length of the longest end of the held text that begins a stop string."""
        longest = max((len(string) for string in self._strings), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-length:]
            if any(string.startswith(end) for string in self._strings):
                return length
        return 0
