"""The engine for asyncio: many callers, each awaiting its own request."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

from chunkcache.engine import loader
from chunkcache.engine.llm import LLM
from chunkcache.engine.lockstep import LockstepEngine
from chunkcache.engine.mailbox import Letter, Mailbox
from chunkcache.engine.outputs import RequestOutput, StreamOutput
from chunkcache.engine.params import SamplingParams
from chunkcache.engine.prompts import Prompt
from chunkcache.engine.stats import EngineStats
from chunkcache.engine.thread import EngineThread, FollowingThread
from chunkcache.errors import InvalidConfigError


class AsyncLLM:
    """`LLM` for asyncio. The engine runs in a thread of its own; no call waits for it.

    Back pressure: a request's outputs wait for its reader and are merged while they do, so that a
    slow reader never slows the others down, and takes no more memory than its own continuation.
    Requests that come in wait in the engine's queue without a limit; who wants one puts a
    semaphore around `generate`.

    Under tensor parallel every process makes one, with the same arguments. The first process takes
    all requests; the others follow it, and end with it::

        async with AsyncLLM(folder, tensor_parallel_size=2) as llm:
            if torch.distributed.get_rank() == 0:
                await serve(llm)

    Example:
        >>> async with AsyncLLM("SmolLM2-135M-Instruct") as llm:
        ...     async for output in llm.generate("Once upon a time", request_id="tale"):
        ...         print(output.outputs[0].text)

    Attributes:
        llm: the `LLM` with the model, the cache and the engine.
    """

    def __init__(
        self,
        model: Any = loader.BUILTIN_MODEL,
        tokenizer: Any | None = None,
        *,
        dtype: Any = None,
        **config: Any,
    ) -> None:
        """Load the model and start the engine's thread; the arguments are those of `LLM`.

        Raises:
            InvalidConfigError: as `LLM`.
        """
        self.llm = LLM(model, tokenizer, dtype=dtype, **config)
        self._mailboxes: dict[int | str, Mailbox] = {}
        engine = self.llm.engine
        if isinstance(engine, LockstepEngine) and not engine.is_first:
            self._thread: EngineThread | FollowingThread = FollowingThread(
                engine, self.llm.request_of
            )
            return
        at_end = engine.release if isinstance(engine, LockstepEngine) else None
        self._thread = EngineThread(engine, at_end)
        # Who forgets `shutdown` gets the memory back all the same.
        weakref.finalize(self, self._thread.stop_soon)

    @property
    def stats(self) -> EngineStats:
        """What the engine has done so far."""
        return self.llm.stats

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str = "",
        priority: int = 0,
        lora: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue one prompt, and yield the request as it grows.

        Each output has everything so far; the last one is ``finished``. Cancelling the task that
        reads, or closing the iterator, aborts the request and gives its chunks back.

        Args:
            prompt: a text, a list of token ids, or a list of chat messages.
            sampling_params: how to choose the tokens and when to end.
            request_id: its name, for `abort`; no two unfinished requests may have the same. By
                default the engine's next number.
            cache_salt: namespace of the prompt; nothing is shared between namespaces.
            priority: class in which it is served, the lowest number first.
            lora: name of its LoRA adapter, None for the bare model.

        Raises:
            InvalidConfigError: an argument is not allowed; other requests are not concerned.
            OutOfChunksError: it can never fit into the pool beside what is pinned.
            EngineError: the engine could not go on with it, or was shut down.
        """
        letters = self._letters(
            prompt, sampling_params, request_id, cache_salt, priority, lora, wants_whole=True
        )
        async with aclosing(letters):
            async for letter in letters:
                if letter.output is not None:
                    yield letter.output

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str = "",
        priority: int = 0,
        lora: str | None = None,
    ) -> AsyncGenerator[StreamOutput, None]:
        """As `generate`, but yield each new piece alone."""
        letters = self._letters(
            prompt, sampling_params, request_id, cache_salt, priority, lora, wants_whole=False
        )
        async with aclosing(letters):
            async for letter in letters:
                for piece in letter.pieces:
                    yield piece

    async def abort(self, request_id: int | str) -> None:
        """End a request; who reads it gets what there is, with the finish reason "abort".

        On return the request has left the engine, and its name is free. A request that has ended,
        or was never there, is left alone.
        """
        mailbox = self._mailboxes.pop(request_id, None)
        if mailbox is not None:
            await asyncio.wrap_future(self._engine_thread.abort(mailbox))

    async def check_accounts(self) -> None:
        """Check that no chunk is lost; see `Engine.check_accounts`."""
        await asyncio.wrap_future(self._engine_thread.check_accounts())

    async def shutdown(self) -> None:
        """End the engine. Who still reads a request gets an `EngineError`, as who comes later.

        Under tensor parallel the first process ends it; in the others this waits for that.

        Raises:
            EngineError: this process follows the first one, and a process was lost.
        """
        if isinstance(self._thread, FollowingThread):
            # Not shielded, it would be taken for ended by whoever is cancelled here.
            await asyncio.shield(asyncio.wrap_future(self._thread.ended))
        else:
            await asyncio.to_thread(self._thread.stop)

    async def __aenter__(self) -> Self:
        """Return the engine, for ``async with``."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Shut the engine down."""
        await self.shutdown()

    @property
    def _engine_thread(self) -> EngineThread:
        if isinstance(self._thread, FollowingThread):
            raise InvalidConfigError(
                f"tensor_parallel_size is {self.llm.config.tensor_parallel_size}, and this is not "
                "the first process; allowed here is to wait for the end of the first one's engine"
            )
        return self._thread

    async def _letters(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str | None,
        cache_salt: str,
        priority: int,
        lora: str | None,
        *,
        wants_whole: bool,
    ) -> AsyncGenerator[Letter, None]:
        thread = self._engine_thread
        if request_id is not None and not isinstance(request_id, str):
            raise InvalidConfigError(f"request_id is {request_id!r}; allowed is None or a str")
        request = self.llm.request(
            prompt,
            sampling_params,
            cache_salt=cache_salt,
            priority=priority,
            lora=lora,
            request_id=request_id,
        )
        mailbox = Mailbox(wants_whole=wants_whole)
        name = request.output.request_id
        if self._mailboxes.setdefault(name, mailbox) is not mailbox:
            raise InvalidConfigError(
                f"request_id is {request_id!r}, which an unfinished request has; "
                "allowed is another one"
            )
        try:
            await asyncio.wrap_future(thread.add(request, mailbox))
            is_last = False
            while not is_last:
                letter = await mailbox.take()
                is_last = letter.is_last
                yield letter
        finally:
            if self._mailboxes.get(name) is mailbox:
                del self._mailboxes[name]
            # After the last letter there is nothing to abort, and this does nothing.
            thread.abort(mailbox)
