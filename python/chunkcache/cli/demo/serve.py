"""Serves the demo's chats twice, with prefix sharing and without, and measures both."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from rich.console import Console

from chunkcache.cli.demo.display import Display
from chunkcache.cli.demo.inputs import DemoInputs
from chunkcache.engine import BUILTIN_MODEL, LLM, RequestOutput, SamplingParams, StreamOutput

# One step takes a whole prompt of the demo, so that all answers soon decode together.
_MAX_NUM_BATCHED_TOKENS = 2048
_MAX_NUM_SEQS = 256


@dataclass(frozen=True)
class Half:
    """One of the two runs.

    Attributes:
        sharing: whether equal prefixes were shared.
        outputs: the requests, in the order of the questions.
        seconds: from the first request to the last token.
        prompt_tokens_computed: prompt rows that were run through the model.
        decode_ms_per_token: time of the steps that only decoded, over the tokens they made.
        step_ms: mean time of those steps, which is what a user waits for the next token.
        kv_bytes: most bytes of K/V held by live sequences at once.
        timeline: (seconds, tokens generated so far) after each step.
        tree: drawing of the prefix tree while all answers were under way.
    """

    sharing: bool
    outputs: list[RequestOutput]
    seconds: float
    prompt_tokens_computed: int
    decode_ms_per_token: float
    step_ms: float
    kv_bytes: int
    timeline: list[tuple[float, int]]
    tree: str

    @property
    def mean_time_to_first_token(self) -> float:
        """Return the mean over the requests, in seconds."""
        return fmean(output.time_to_first_token for output in self.outputs)

    @property
    def last_time_to_first_token(self) -> float:
        """Return the longest of the requests, in seconds."""
        return max(output.time_to_first_token for output in self.outputs)

    @property
    def num_generated_tokens(self) -> int:
        """Return the tokens of all answers."""
        return sum(len(output.outputs[0].token_ids) for output in self.outputs)


@dataclass(frozen=True)
class DemoResult:
    """Both runs over the same inputs.

    Attributes:
        model: name of the model.
        inputs: what was served.
        num_shared_tokens: tokens that all prompts begin with.
        num_prompt_tokens: tokens of all prompts together.
        shared: the run with prefix sharing.
        separate: the run without.
    """

    model: str
    inputs: DemoInputs
    num_shared_tokens: int
    num_prompt_tokens: int
    shared: Half
    separate: Half

    @property
    def num_equal_answers(self) -> int:
        """Return how many answers have the same tokens in both runs."""
        pairs = zip(self.shared.outputs, self.separate.outputs, strict=True)
        return sum(a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in pairs)


def serve_both_ways(
    inputs: DemoInputs, model: str | None, max_tokens: int, console: Console
) -> DemoResult:
    """Run both halves with one model and show their progress on ``console``."""
    name = model or BUILTIN_MODEL
    console.print(f"Loading {name}; the first time, it is converted.", highlight=False)
    llm = _engine(name, None, sharing=True)
    shared = _serve(llm, inputs, max_tokens, Display(console, inputs.questions, "sharing on"))
    # The weights are the same objects: only the cache is new.
    without = _engine(llm.model, llm.tokenizer, sharing=False)
    del llm
    separate = _serve(
        without, inputs, max_tokens, Display(console, inputs.questions, "sharing off")
    )
    prompts = [output.prompt_token_ids for output in shared.outputs]
    return DemoResult(
        model=name,
        inputs=inputs,
        num_shared_tokens=_num_common_tokens(prompts),
        num_prompt_tokens=sum(map(len, prompts)),
        shared=shared,
        separate=separate,
    )


def _engine(model: object, tokenizer: object, *, sharing: bool) -> LLM:
    return LLM(
        model,
        tokenizer,
        enable_prefix_sharing=sharing,
        max_num_seqs=_MAX_NUM_SEQS,
        max_num_batched_tokens=_MAX_NUM_BATCHED_TOKENS,
    )


def _serve(llm: LLM, inputs: DemoInputs, max_tokens: int, display: Display) -> Half:
    params = SamplingParams(max_tokens=max_tokens)
    outputs: dict[int, RequestOutput] = {}
    timeline: list[tuple[float, int]] = []
    tree = ""
    begin = time.perf_counter()
    with display:
        for piece in llm.generate(inputs.chats(), params, stream=True):
            outputs[piece.request_index] = piece.request
            display.show(piece)
            timeline.append((time.perf_counter() - begin, len(timeline) + 1))
            if not tree and _all_begun(piece, outputs.values(), len(inputs.questions)):
                tree = llm.cache.tree.render()
    stats = llm.stats
    num_steps = stats.num_decode_steps
    return Half(
        sharing=llm.config.enable_prefix_sharing,
        outputs=[outputs[index] for index in range(len(inputs.questions))],
        seconds=time.perf_counter() - begin,
        prompt_tokens_computed=stats.num_prompt_tokens_computed,
        decode_ms_per_token=1e3 * stats.decode_seconds / max(1, stats.num_decode_tokens),
        step_ms=1e3 * stats.decode_seconds / max(1, num_steps),
        kv_bytes=stats.peak_kv_bytes,
        timeline=timeline,
        tree=tree,
    )


def _all_begun(piece: StreamOutput, outputs: Iterable[RequestOutput], num_requests: int) -> bool:
    """Tell whether every request has a token, or the first of them is about to leave."""
    return piece.finish_reason is not None or len(list(outputs)) == num_requests


def _num_common_tokens(prompts: list[list[int]]) -> int:
    """Return the length of the beginning that all prompts have in common."""
    first, last = min(prompts), max(prompts)
    return next(
        (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b),
        min(len(first), len(last)),
    )
