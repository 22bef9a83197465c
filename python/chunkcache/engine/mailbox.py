"""How outputs get from the engine's thread to a coroutine that waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, replace

from chunkcache.engine.outputs import RequestOutput, StreamOutput
from chunkcache.engine.sequence import Request


@dataclass(frozen=True, slots=True)
class Letter:
    """What is new about a request.

    Attributes:
        pieces: the pieces since the last letter.
        output: the whole request, as it was after the last of those pieces; None if it has an
            error.
        is_last: whether nothing will follow.
        error: what ended the request, None if it did not fail.
    """

    pieces: list[StreamOutput]
    output: RequestOutput | None
    is_last: bool
    error: Exception | None = None


class Mailbox:
    """Where one request's outputs wait until they are taken.

    Only its event loop touches it; `post` brings letters there from any thread. Letters that are
    not taken are merged into one, so that a slow reader costs no more memory than its request.
    """

    def __init__(self) -> None:
        """Belong to the running event loop."""
        self.loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._letter: Letter | None = None

    def put(self, letter: Letter) -> None:
        """Add a letter; in the mailbox's event loop."""
        if self._letter is not None:
            letter = replace(letter, pieces=self._letter.pieces + letter.pieces)
        self._letter = letter
        self._arrived.set()

    async def take(self) -> Letter:
        """Wait for a letter.

        Raises:
            ChunkCacheError: what ended the request before its end.
        """
        await self._arrived.wait()
        self._arrived.clear()
        letter, self._letter = self._letter, None
        # The event is set by a letter alone, and there is one reader.
        assert letter is not None
        if letter.error is not None:
            raise letter.error
        return letter


def post(letters: Iterable[tuple[Mailbox, Letter]]) -> list[Mailbox]:
    """Bring letters to their mailboxes, with one call for each event loop.

    Returns:
        The mailboxes that do not exist any more, since their event loop is closed.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Mailbox, Letter]]] = {}
    for mailbox, letter in letters:
        by_loop.setdefault(mailbox.loop, []).append((mailbox, letter))
    lost: list[Mailbox] = []
    for loop, own in by_loop.items():
        try:
            loop.call_soon_threadsafe(_put_all, own)
        except RuntimeError:
            lost += [mailbox for mailbox, _ in own]
    return lost


def _put_all(letters: list[tuple[Mailbox, Letter]]) -> None:
    for mailbox, letter in letters:
        mailbox.put(letter)


def news_of(request: Request) -> Letter | None:
    """Take what is new about a request, None if nothing is; between two steps of its engine."""
    pieces: list[StreamOutput] = []
    while request.pieces:
        pieces.append(request.pieces.popleft())
    if request.error is not None:
        return Letter(pieces, None, True, request.error)
    if not pieces:
        return None
    return Letter(pieces, snapshot(request.output), request.finished)


def snapshot(output: RequestOutput) -> RequestOutput:
    """Return a copy that stays as it is while the request goes on."""
    samples = [
        replace(
            sample,
            token_ids=list(sample.token_ids),
            token_times=list(sample.token_times),
            logprobs=None if sample.logprobs is None else list(sample.logprobs),
        )
        for sample in output.outputs
    ]
    return replace(output, outputs=samples)
