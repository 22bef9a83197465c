"""Runs planned steps, one after another, beside the thread that plans them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from chunkcache.engine.logprobs import Logprob
from chunkcache.engine.picker import Pick, Picked
from chunkcache.engine.runner import NewTokens, StepInput
from chunkcache.engine.step import Step
from chunkcache.errors import ChunkCacheError

# How long a step is awaited without a look at whether it can end at all.
_CHECK_SECONDS = 0.25
# A small part of what a step of several devices takes.
_POLL_SECONDS = 50e-6


class Runner(Protocol):
    """What computes the logits of a step: `chunkcache.engine.runner.ModelRunner`, or its like."""

    @property
    def device(self) -> torch.device:
        """Where token ids are expected."""

    def run(self, step: StepInput) -> torch.Tensor:
        """Compute a step and leave its plan open; see `ModelRunner.run`."""


class Picker(Protocol):
    """What picks tokens: `chunkcache.engine.picker.TokenPicker`, or its like."""

    def pick(self, logits: torch.Tensor, picks: Sequence[Pick]) -> Picked:
        """Pick a token for each of ``picks``; see `TokenPicker.pick`."""


class ModelStepError(Exception):
    """The forward pass failed, or the picking of all its tokens; `__cause__` is what was raised."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave.

    Attributes:
        tokens: the picked tokens, one for each of the step's picks.
        logprobs: for each pick its log-probabilities, None if they are not wanted.
        errors: the picks that failed, by their index.
        completes: the picks after which a guided text is complete, by their index.
        prompt_errors: the prompts whose log-probabilities failed, by their index in the step.
        begin: when the step began, on the clock of `time.perf_counter`.
        end: when it ended.
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob] | None]
    errors: dict[int, Exception]
    completes: set[int]
    prompt_errors: dict[int, Exception]
    begin: float
    end: float


class RunningStep:
    """A step that was handed to the executor."""

    def __init__(
        self,
        future: Future[_Output],
        run: Callable[[], None] | None,
        check: Callable[[], None] | None,
    ) -> None:
        """Keep where its output goes, what runs it if no thread does, and what ends the wait."""
        self._future = future
        self._run = run
        self._check = check

    def result(self) -> StepResult:
        """Wait for the step; without a thread it runs now.

        Raises:
            ModelStepError: it failed, or was not run because one before it failed.
        """
        if self._run is not None and not self._future.done():
            self._run()
        try:
            output = self._awaited()
            tokens = output.tokens.wait(self._check)
        except ChunkCacheError as error:
            raise ModelStepError(str(error)) from error
        except RuntimeError as error:
            raise ModelStepError(f"the model step failed: {named(error)}") from error
        picked = output.picked
        return StepResult(
            tokens,
            picked.logprobs,
            picked.failed(tokens),
            picked.completes,
            output.prompt_errors,
            output.begin,
            output.end,
        )

    def _awaited(self) -> _Output:
        if self._check is not None:
            while not self._future.done():
                wait([self._future], _CHECK_SECONDS)
                self._check()
        return self._future.result()


class StepExecutor:
    """Runs steps in the order in which they come.

    With ``overlap`` they run in a thread of their own, so that one may be handed over while the one
    before it runs, and the next begins the moment that one has ended. A CUDA device needs no thread
    for that: it is given its work at once, and the host goes on. The tokens that a step picks stay
    on its device for the next step; the engine gets a copy.
    """

    def __init__(
        self,
        runner: Runner,
        picker: Picker,
        *,
        overlap: bool,
        check: Callable[[], None] | None = None,
    ) -> None:
        """Start with nothing to run.

        Args:
            runner: computes the logits of a step.
            picker: picks its tokens.
            overlap: run steps while the caller goes on.
            check: raises a `ChunkCacheError` when a step that is awaited may never end.
        """
        self._runner = runner
        self._picker = picker
        self._check = check
        self._picked: Picked | None = None
        self._failed = False
        queues_work = runner.device.type == "cuda"
        self._runs_at_once = overlap and queues_work
        # What may never end is not for the thread of the caller.
        needs_thread = (overlap or check is not None) and not queues_work
        self._threads = ThreadPoolExecutor(1, "chunkcache-model") if needs_thread else None

    def submit(self, step: Step) -> RunningStep:
        """Hand a step over. Its plan is to stay open until its result is there."""
        if self._threads is not None:
            return RunningStep(self._threads.submit(self._run_in_thread, step), None, self._check)
        future: Future[_Output] = Future()

        def run() -> None:
            try:
                future.set_result(self._run(step))
            except ModelStepError as error:
                future.set_exception(error)

        if self._runs_at_once:
            run()
        return RunningStep(future, run, self._check)

    def recover(self) -> None:
        """Run steps again after one failed and all that were handed over are through."""
        self._failed = False
        self._picked = None

    def _run_in_thread(self, step: Step) -> _Output:
        try:
            return self._run(step)
        except ModelStepError:
            raise
        except BaseException as error:
            # What would end a program is not meant for the thread that waits for the step.
            raise ModelStepError(f"the model step was interrupted: {named(error)}") from error

    def _run(self, step: Step) -> _Output:
        if self._failed:
            raise ModelStepError("the step was not run, since the one before it failed")
        begin = time.perf_counter()
        try:
            picked, prompt_errors = self._compute(step)
        except BaseException:
            self._failed = True
            raise
        self._picked = picked
        tokens = _HostTokens(picked.tokens)
        return _Output(tokens, picked, prompt_errors, begin, time.perf_counter())

    def _compute(self, step: Step) -> tuple[Picked, dict[int, Exception]]:
        device = self._runner.device
        tokens = NewTokens(
            step.token_ids,
            device,
            step.pending_rows,
            step.pending_picks,
            None if self._picked is None else self._picked.tokens,
        )
        try:
            logits = self._runner.run(
                StepInput(
                    step.plan,
                    tokens,
                    step.logits_rows,
                    step.adapter_rows,
                    is_decode=step.is_decode,
                    takes_all_rows=step.takes_all_rows,
                )
            )
        except Exception as error:
            raise ModelStepError(f"the model step failed: {named(error)}") from error
        try:
            if step.picks:
                picked = self._picker.pick(logits, step.picks)
            else:
                picked = Picked(torch.empty(0, dtype=torch.int64, device=device), [])
        except Exception as error:
            raise ModelStepError(f"picking the step's tokens failed: {named(error)}") from error
        return picked, _collect_prompt_logprobs(logits, step)


def _collect_prompt_logprobs(logits: torch.Tensor, step: Step) -> dict[int, Exception]:
    errors: dict[int, Exception] = {}
    for index, rows in enumerate(step.prompt_rows):
        request = rows.sequence.request
        try:
            if request.prompt_logprobs is not None:
                request.prompt_logprobs.add(logits[rows.begin : rows.end], request.tokenizer)
        except Exception as error:
            errors[index] = error
    return errors


def named(error: BaseException) -> str:
    """Return the kind and the message of an error."""
    return f"{type(error).__name__}: {error}"


class _HostTokens:
    """Tokens on their way from a device; on the CPU they are there at once."""

    def __init__(self, tokens: torch.Tensor) -> None:
        """Begin the copy, behind what the device has been given to do so far."""
        self._tokens = tokens
        self._event: Any = None
        if tokens.is_cuda:
            self._tokens = torch.empty_like(tokens, device="cpu", pin_memory=True)
            self._tokens.copy_(tokens, non_blocking=True)
            self._event = torch.cuda.current_stream(tokens.device).record_event()

    def wait(self, check: Callable[[], None] | None) -> list[int]:
        """Return the tokens when they are there, whatever the device does after them.

        Args:
            check: raises what is to end the wait; without it nothing does.
        """
        if self._event is not None:
            while check is not None and not self._event.query():
                check()
                time.sleep(_POLL_SECONDS)
            self._event.synchronize()
        if check is not None:
            # What a device gives that was broken off is nothing.
            check()
        tokens: list[int] = self._tokens.tolist()
        return tokens


@dataclass(frozen=True, slots=True)
class _Output:
    tokens: _HostTokens
    picked: Picked
    prompt_errors: dict[int, Exception]
    begin: float
    end: float
