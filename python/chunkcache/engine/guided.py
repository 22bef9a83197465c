"""Output that keeps to a JSON schema, a regular expression or a choice, by llguidance.

Before a token is picked, llguidance tells which tokens may follow; the others get no probability.
Needs the extra ``guided``: ``pip install 'chunkcache[guided]'``.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable
from copy import copy
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from chunkcache.engine.params import SamplingParams
from chunkcache.errors import ChunkCacheError, InvalidConfigError

_MAX_GRAMMARS = 64
_END = "<|end of guided text|>"


class GrammarState:
    """Where one text stands in its grammar."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        """Take over ``matcher``, llguidance's ``LLMatcher``."""
        self._matcher = matcher
        self._mask = np.zeros(-(-vocab_size // 32), np.uint32)

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow."""
        return bool(self._matcher.is_stopped())

    def forbid(self, logits: npt.NDArray[np.float64]) -> None:
        """Set the logits ``[vocab_size]`` of what may not come next to minus infinity.

        Raises:
            ChunkCacheError: the grammar has become too complex.
        """
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        self._check()
        allowed = np.unpackbits(self._mask.view(np.uint8), count=len(logits), bitorder="little")
        logits[allowed == 0] = -np.inf

    def accept(self, token_id: int) -> None:
        """Go on past a token.

        Raises:
            ChunkCacheError: the grammar has become too complex.
        """
        self._matcher.consume_token(token_id)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ChunkCacheError(f"guided output: {self._matcher.get_error()}")


class Grammar:
    """A compiled grammar."""

    def __init__(self, matcher: Any, vocab_size: int, end_token_ids: frozenset[int]) -> None:
        """Keep ``matcher``, which stands at the beginning."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        #: The tokens that end a text where more could follow.
        self.end_token_ids = end_token_ids

    def begin(self) -> GrammarState:
        """Return the state of a new text."""
        return GrammarState(self._matcher.deep_copy(), self._vocab_size)


class GrammarCompiler:
    """Compiles the grammars of an engine's requests, each once."""

    def __init__(
        self, tokenizer: Any | None, vocab_size: int, eos_token_ids: Iterable[int]
    ) -> None:
        """Do nothing yet: what a tokenizer needs is made when it is first used.

        Args:
            tokenizer: a fast Hugging Face tokenizer.
            vocab_size: size of the model's logits.
            eos_token_ids: the model's; if the tokenizer has none of them, its own counts.
        """
        self._tokenizer = tokenizer
        self._size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._lock = threading.Lock()
        self._vocabulary: Any = None
        self._compiled: OrderedDict[str, Grammar] = OrderedDict()

    def compile(self, params: SamplingParams) -> Grammar | None:
        """Return the grammar that ``params`` asks for, None if it asks for none.

        Raises:
            InvalidConfigError: it cannot be compiled, or there is no fast tokenizer.
            ModuleNotFoundError: the extra is missing.
        """
        if params.guided is None:
            return None
        if find_spec("llguidance") is None:
            raise ModuleNotFoundError(
                f"{params.guided} needs llguidance: pip install 'chunkcache[guided]'",
                name="llguidance",
            )
        with self._lock:
            return self._compile(params, params.guided)

    def _compile(self, params: SamplingParams, name: str) -> Grammar:
        from llguidance import LLMatcher

        given = getattr(params, name)
        source = _source(name, given)
        grammar = self._compiled.get(source)
        if grammar is None:
            # Anything but silence would write to standard error.
            matcher = LLMatcher(self._vocabulary_for(name), source, log_level=0)
            if matcher.is_error():
                reason = matcher.get_error()
                raise InvalidConfigError(f"{name} is {given!r}, which cannot be served: {reason}")
            ends = frozenset(self._vocabulary.eos_tokens)
            grammar = Grammar(matcher, self._vocabulary.vocab_size, ends)
            self._compiled[source] = grammar
        self._compiled.move_to_end(source)
        while len(self._compiled) > _MAX_GRAMMARS:
            self._compiled.popitem(last=False)
        return grammar

    def _vocabulary_for(self, name: str) -> Any:
        if self._vocabulary is None:
            tokenizer: Any = self._tokenizer
            if not getattr(tokenizer, "is_fast", False):
                kind = "no tokenizer" if tokenizer is None else "a slow one"
                raise InvalidConfigError(
                    f"{name} is given, but there is {kind}; allowed is a fast tokenizer"
                )
            self._vocabulary = _make_vocabulary(tokenizer, self._size, self._eos_token_ids)
        return self._vocabulary


def _make_vocabulary(tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]) -> Any:
    """Return llguidance's ``LLTokenizer`` for a tokenizer and a model."""
    from llguidance import LLTokenizer

    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    ends = {token for token in eos_token_ids if token < len(tokenizer)}
    if not ends and tokenizer.eos_token_id is not None:
        ends = {tokenizer.eos_token_id}
    if not ends:
        # llguidance would take the first token of the vocabulary.
        backend.add_special_tokens([_END])
        ends = {backend.token_to_id(_END)}
    size = max(vocab_size, backend.get_vocab_size())
    return LLTokenizer(backend.to_str(), n_vocab=size, eos_token=sorted(ends))


def _source(name: str, given: Any) -> str:
    """Return the grammar in llguidance's own form."""
    from llguidance import LLMatcher

    if name == "guided_json":
        schema = given if isinstance(given, str) else json.dumps(given)
        return str(LLMatcher.grammar_from_json_schema(schema))
    if name == "guided_regex":
        return str(LLMatcher.grammar_from_regex(given))
    choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in given)
    return str(LLMatcher.grammar_from_lark(f"start: {choices}"))
