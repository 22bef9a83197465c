"""The front of the engine: a model, its cache, and `LLM.generate`."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import torch
from tqdm import tqdm

from chunkcache import ChunkCache
from chunkcache.engine import arguments, loader, parallel
from chunkcache.engine.capacity import pool_capacity
from chunkcache.engine.config import EngineConfig, ModelSpec
from chunkcache.engine.core import Engine
from chunkcache.engine.device import HALVES, default_dtype, resolve_device
from chunkcache.engine.executor import Picker, Runner, StepExecutor
from chunkcache.engine.graph_runner import GraphRunner
from chunkcache.engine.guided import GrammarCompiler
from chunkcache.engine.inspection import inspect_model
from chunkcache.engine.lockstep import LockstepEngine, Order
from chunkcache.engine.lora import Adapters, namespace
from chunkcache.engine.outputs import RequestOutput, StreamOutput
from chunkcache.engine.params import SamplingParams, check_vocabulary
from chunkcache.engine.picker import TokenPicker
from chunkcache.engine.probe import probe
from chunkcache.engine.processes import Processes, start
from chunkcache.engine.prompts import Prompt, TokenizedPrompt, tokenize
from chunkcache.engine.runner import ModelRunner
from chunkcache.engine.scheduler import Scheduler
from chunkcache.engine.sequence import Request
from chunkcache.engine.stats import EngineStats
from chunkcache.errors import InvalidConfigError, OutOfChunksError


class LLM:
    """A Hugging Face model that serves many requests over one shared-prefix cache.

    Example:
        >>> llm = LLM("SmolLM2-135M-Instruct")
        >>> chat = [{"role": "user", "content": "What is a prefix tree?"}]
        >>> llm.generate(chat, SamplingParams(max_tokens=40))[0].outputs[0].text
    """

    def __init__(
        self,
        model: Any = loader.BUILTIN_MODEL,
        tokenizer: Any | None = None,
        *,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        lora_adapters: Mapping[str, str | Path] | None = None,
        **config: Any,
    ) -> None:
        """Load the model, check that it can be served, and make its cache.

        Args:
            model: a folder with a model (safetensors or GGUF), a .gguf file, the name of the
                built-in model, or a loaded ``PreTrainedModel``. Nothing is downloaded.
            tokenizer: a Hugging Face tokenizer; by default the one in the model's folder. Without
                one, prompts are token ids and outputs have no text.
            dtype: "float32", "bfloat16", "float16", or "auto" for the saved one. By default
                float32 on the CPU and bfloat16 on a CUDA device, or a loaded model's own.
            device: "cpu", "cuda" or "cuda:N"; by default a loaded model's own, else the CPU. A
                CUDA device needs the extra ``cuda``, a half-precision dtype, and a head_dim that
                the kernels were written for.
            lora_adapters: a name for each LoRA adapter, and its folder as peft saves it. Requests
                choose one by its name. Needs the extra ``lora``.
            config: the fields of `EngineConfig`.

        Raises:
            InvalidConfigError: an argument is not allowed, or the model or an adapter has a feature
                that the engine does not serve.
        """
        self.config = EngineConfig(**arguments.check_options(config))
        arguments.check_tokenizer(tokenizer)
        if self.config.num_threads is not None:
            torch.set_num_threads(self.config.num_threads)
        size = self.config.tensor_parallel_size
        if size == 1:
            self._set_up(model, tokenizer, dtype, device, lora_adapters, None)
            return
        parallel.check_options(self.config)
        place = parallel.place_of_process(device, size)
        start(size, place)
        processes = Processes(place)
        # At the end of the program all end, and no process needs to be told.
        weakref.finalize(self, processes.close).atexit = False
        with processes.reporting("making the engine"):
            self._set_up(model, tokenizer, dtype, place, lora_adapters, processes)

    def _set_up(
        self,
        model: Any,
        tokenizer: Any | None,
        dtype: str | torch.dtype | None,
        device: str | torch.device | None,
        lora_adapters: Mapping[str, str | Path] | None,
        processes: Processes | None,
    ) -> None:
        size = self.config.tensor_parallel_size
        adapters = arguments.check_adapters(lora_adapters)
        if processes is not None:
            given = {"dtype": str(dtype), "lora_adapters": list(adapters)}
            processes.check_equal({**vars(self.config), **given})
        if isinstance(model, (str, Path)):
            folder = loader.resolve(model)
            place = resolve_device("cpu" if device is None else device)
            arguments.check_on_device(self.config, place)
            wanted = default_dtype(place) if dtype is None else arguments.torch_dtype(dtype)
            self.model = loader.load_model(folder, wanted, place, size)
            self.tokenizer = loader.load_tokenizer(folder) if tokenizer is None else tokenizer
        else:
            self.model = arguments.check_loaded(model, dtype, device)
            arguments.check_on_device(self.config, self.model.device)
            self.tokenizer = tokenizer
        arguments.check_parts(self.model, size)
        if processes is not None:
            # No process waits in a layer for one that could not load the model.
            processes.check_equal(parallel.described(self.model, self.tokenizer))
        self.spec: ModelSpec = inspect_model(self.model)
        on_cuda = self.model.device.type == "cuda"
        if on_cuda and self.spec.dtype not in HALVES:
            raise InvalidConfigError(
                f"dtype is {self.spec.dtype}; allowed on a CUDA device is {' or '.join(HALVES)}"
            )
        if size > 1:
            parallel.check_split(self.model, self.spec, size)
        probe(self.model, self.spec)
        self._adapters = Adapters(self.model, adapters)
        kv_dtype = self.config.kv_dtype(self.spec.dtype)
        chunk_bytes = self.spec.chunk_bytes(self.config.chunk_size, kv_dtype)
        self.capacity = pool_capacity(self.config, self.spec, chunk_bytes, self.model.device)
        if processes is not None:
            # What is free may differ, and so would the schedules.
            self.capacity = min(processes.everyones(self.capacity))
        self.max_model_len = arguments.max_model_len(self.config, self.spec, self.capacity)
        token_budget = self.config.token_budget(self.max_model_len)
        self.cache = ChunkCache(
            self.spec.num_layers,
            self.spec.num_kv_heads,
            self.spec.head_dim,
            dtype=kv_dtype,
            chunk_size=self.config.chunk_size,
            capacity=self.capacity,
            enable_prefix_sharing=self.config.enable_prefix_sharing,
            device=str(self.model.device),
            k_scale=self.config.k_scale,
            v_scale=self.config.v_scale,
            **(
                {"num_qo_heads": self.spec.num_qo_heads}
                if on_cuda
                else {"num_threads": torch.get_num_threads()}
            ),
        )
        self._grammars = GrammarCompiler(
            self.tokenizer, self.spec.vocab_size, self.spec.eos_token_ids
        )
        self._seeds = np.random.default_rng(self.config.seed)
        self._request_ids = itertools.count()
        own_runner = self._runner(max_rows=min(self.config.max_num_seqs, token_budget))
        runner: Runner = own_runner
        picker: Picker = TokenPicker(own_runner.best_of)
        if processes is not None:
            runner = parallel.SharedRunner(runner, processes)
            picker = parallel.SharedPicker(picker, processes, parallel.group_of(self.model))
        engine = Engine(
            StepExecutor(
                runner,
                picker,
                overlap=self.config.enable_overlap,
                check=None if processes is None else processes.check,
            ),
            Scheduler(
                self.cache,
                max_num_seqs=self.config.max_num_seqs,
                max_num_batched_tokens=token_budget,
                chunked_prefill=self.config.enable_chunked_prefill,
                sharing=self.config.enable_prefix_sharing,
            ),
            chunk_bytes=chunk_bytes,
        )
        self.engine: Engine | LockstepEngine = engine
        if processes is not None:
            processes.begin(parallel.break_off(self.model))
            self.engine = LockstepEngine(engine, self.cache, processes)

    def _runner(self, max_rows: int) -> GraphRunner | ModelRunner:
        if self.model.device.type == "cuda" and self.config.enable_cuda_graphs:
            return GraphRunner(
                self.model,
                self.cache,
                self._adapters,
                max_rows=max_rows,
                num_positions=self.max_model_len,
                compiled=self.config.compile_model,
            )
        return ModelRunner(self.model, self.cache, self._adapters)

    @property
    def stats(self) -> EngineStats:
        """What the engine has done so far."""
        return self.engine.stats

    def reset_stats(self) -> None:
        """Count from zero again."""
        self.engine.stats = EngineStats()

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: Literal[False] = False,
        progress: bool | None = None,
        cache_salt: str | Sequence[str] = "",
        priority: int | Sequence[int] = 0,
        lora: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]: ...

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: Literal[True],
        progress: bool | None = None,
        cache_salt: str | Sequence[str] = "",
        priority: int | Sequence[int] = 0,
        lora: str | Sequence[str | None] | None = None,
    ) -> Iterator[StreamOutput]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stream: bool = False,
        progress: bool | None = None,
        cache_salt: str | Sequence[str] = "",
        priority: int | Sequence[int] = 0,
        lora: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput] | Iterator[StreamOutput]:
        """Continue one prompt or many.

        Args:
            prompts: a text, a list of token ids, a list of chat messages, or a list of those.
            sampling_params: one for all prompts, or one for each.
            stream: return an iterator over pieces of text as they come. Closing it, or leaving its
                loop, aborts what is unfinished and gives its chunks back.
            progress: show a bar on standard error; by default when that is a terminal and
                ``stream`` is False.
            cache_salt: namespace of the prompts, one for all or one for each; nothing is shared
                between namespaces.
            priority: class of the prompts, one for all or one for each. The lowest number is served
                first; within a class the first come. No class waits for ever (`WaitingQueue`).
            lora: name of the LoRA adapter of the prompts, one for all or one for each; None is the
                bare model (vLLM's ``lora_request``, by name).

        Returns:
            One output for each prompt, in their order; with ``stream``, an iterator.

        Raises:
            InvalidConfigError: a prompt or parameter is not allowed; nothing has started then.
            OutOfChunksError: a prompt with its continuation can never fit into the pool beside
                what is pinned; nothing has started then.
            EngineError: the model, the sampler or the planning of a step failed.
        """
        requests = self._requests(
            prompts, sampling_params, cache_salt, priority, lora, streams=bool(stream)
        )
        if stream:
            return self._stream(requests, bool(progress))
        show = sys.stderr.isatty() if progress is None else progress
        for _ in self._stream(requests, show):
            pass
        return [request.output for request in requests]

    def request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        priority: int = 0,
        lora: str | None = None,
        request_id: int | str | None = None,
        arrival_time: float | None = None,
    ) -> Request:
        """Make a request for `engine.add`, for callers that run the engine's steps themselves.

        Args:
            prompt: one prompt, as `generate` takes it.
            sampling_params: its parameters.
            cache_salt: its namespace.
            priority: its class.
            lora: name of its LoRA adapter, None for the bare model.
            request_id: how its outputs are named; the next number by default.
            arrival_time: when it came, on the clock of `time.perf_counter`; now by default.

        Raises:
            InvalidConfigError: a prompt or parameter is not allowed.
            OutOfChunksError: it can never fit into the pool beside what is pinned.
        """
        tokenized = tokenize(prompt, self.tokenizer, self.spec.vocab_size)
        if len(tokenized) != 1:
            raise InvalidConfigError(f"prompt is {len(tokenized)} prompts; allowed is one")
        if sampling_params is None:
            sampling_params = SamplingParams()
        if not isinstance(sampling_params, SamplingParams):
            raise InvalidConfigError(
                f"sampling_params is a {type(sampling_params).__name__}; allowed is SamplingParams"
            )
        arguments.check_salt(cache_salt)
        arguments.check_priority(priority)
        self._check_lora(lora)
        max_tokens = self._max_tokens(tokenized[0], 0, sampling_params, namespace(cache_salt, lora))
        if request_id is None:
            request_id = next(self._request_ids)
        return Request(
            request_id,
            0,
            tokenized[0],
            sampling_params,
            max_tokens=max_tokens,
            seed=self._seed(sampling_params),
            cache_salt=namespace(cache_salt, lora),
            priority=priority,
            eos_token_ids=self.spec.eos_token_ids,
            tokenizer=self.tokenizer,
            grammar=self._grammars.compile(sampling_params),
            lora=lora,
            arrival_time=arrival_time,
        )

    def request_of(self, order: Order) -> Request:
        """Make the request that another process has taken in."""
        return Request(
            *order[:4],
            max_tokens=order.max_tokens,
            seed=0,
            cache_salt=order.cache_salt,
            priority=order.priority,
            eos_token_ids=self.spec.eos_token_ids,
            tokenizer=self.tokenizer,
            grammar=self._grammars.compile(order.params),
            lora=order.lora,
            # Nobody here reads it.
            streams=False,
        )

    def check_accounts(self) -> None:
        """Check that no chunk is lost; see `Engine.check_accounts`."""
        self.engine.check_accounts()

    def _stream(self, requests: list[Request], progress: bool) -> Iterator[StreamOutput]:
        unfinished = list(requests)
        with tqdm(total=len(requests), unit="prompt", disable=not progress) as bar:
            try:
                self.engine.add(requests)
                while unfinished:
                    self.engine.step()
                    # Before the pieces are taken: another thread's step may add the last ones.
                    left = [request for request in unfinished if not request.finished]
                    for request in unfinished:
                        while request.pieces:
                            yield request.pieces.popleft()
                        if request.error is not None:
                            raise request.error
                    if progress:
                        tokens = sum(request.num_generated_tokens for request in requests)
                        bar.set_postfix_str(f"{tokens} tokens", refresh=False)
                        bar.update(len(unfinished) - len(left))
                    unfinished = left
            finally:
                self.engine.abort(unfinished)

    def _requests(
        self,
        prompts: Any,
        sampling_params: Any,
        cache_salt: Any,
        priority: Any,
        lora: Any,
        *,
        streams: bool,
    ) -> list[Request]:
        tokenized = tokenize(prompts, self.tokenizer, self.spec.vocab_size)
        params = arguments.params_for_each(sampling_params, len(tokenized))
        salts = arguments.for_each(
            "cache_salt", cache_salt, str, len(tokenized), arguments.check_salt
        )
        priorities = arguments.for_each(
            "priority", priority, int, len(tokenized), arguments.check_priority
        )
        loras = arguments.for_each("lora", lora, str | None, len(tokenized), self._check_lora)
        salts = [namespace(*pair) for pair in zip(salts, loras, strict=True)]
        limits = [
            self._max_tokens(prompt, index, prompt_params, salt)
            for index, (prompt, prompt_params, salt) in enumerate(
                zip(tokenized, params, salts, strict=True)
            )
        ]
        grammars = [self._grammars.compile(prompt_params) for prompt_params in params]
        return [
            Request(
                next(self._request_ids),
                index,
                prompt,
                params[index],
                max_tokens=limits[index],
                seed=self._seed(params[index]),
                cache_salt=salts[index],
                priority=priorities[index],
                eos_token_ids=self.spec.eos_token_ids,
                tokenizer=self.tokenizer,
                grammar=grammars[index],
                lora=loras[index],
                streams=streams,
            )
            for index, prompt in enumerate(tokenized)
        ]

    def _max_tokens(
        self, prompt: TokenizedPrompt, index: int, params: SamplingParams, cache_salt: str
    ) -> int:
        """Return how many tokens the request may generate, if it can be served at all."""
        check_vocabulary(params, self.spec.vocab_size)
        if params.stop and self.tokenizer is None:
            raise InvalidConfigError("stop is given, but there is no tokenizer to make text")
        num_prompt = len(prompt.token_ids)
        if num_prompt >= self.max_model_len:
            raise InvalidConfigError(
                f"prompt {index} has {num_prompt} tokens; allowed is less than the model's "
                f"length of {self.max_model_len}"
            )
        chunk_size = self.config.chunk_size
        stats = self.cache.stats()
        num_usable = self.capacity
        if stats.num_pinned:
            # What is pinned of its own prefix it uses; all that it finds may be.
            match = self.cache.match_prefix(prompt.token_ids, cache_salt)
            num_own = min(match.num_filled // chunk_size, stats.num_pinned)
            num_usable -= stats.num_pinned - num_own
        # The last token that is generated needs no K/V.
        pool_room = num_usable * chunk_size - num_prompt + 1
        room = self.max_model_len - num_prompt
        wanted = max(1, pool_room) if params.max_tokens is None else params.max_tokens
        max_tokens = min(wanted, room)
        if max_tokens > pool_room:
            needed = -(-(num_prompt + max_tokens - 1) // chunk_size)
            pinned = f", of which {self.capacity - num_usable} are pinned for others"
            raise OutOfChunksError(
                f"prompt {index} with {num_prompt} tokens and max_tokens {max_tokens} needs "
                f"{needed} chunks of {chunk_size} tokens; the pool has {self.capacity}"
                f"{pinned if num_usable < self.capacity else ''}",
                needed,
                stats.num_free,
                stats.num_evictable,
            )
        return max_tokens

    def _check_lora(self, lora: Any) -> None:
        names = self._adapters.names
        if lora is not None and lora not in names:
            allowed = ", ".join(map(repr, names)) or "None, since LLM got no lora_adapters"
            raise InvalidConfigError(f"lora is {lora!r}; allowed is {allowed}")

    def _seed(self, params: SamplingParams) -> int:
        if params.seed is not None or params.greedy:
            return params.seed or 0
        return int(self._seeds.integers(2**63))
