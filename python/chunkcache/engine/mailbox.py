"""How outputs get from the engine's thread to a coroutine that waits for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace

from chunkcache.engine.outputs import RequestOutput, StreamOutput
from chunkcache.engine.sequence import Request


@dataclass(frozen=True, slots=True)
class Letter:
    """What is new about a request.

    Attributes:
        pieces: the pieces since the last letter; none where the reader wants the whole request.
        output: the whole request, as it was after the last piece; None where the reader wants the
            pieces, or the request has an error.
        is_last: whether nothing will follow.
        error: what ended the request, None if it did not fail.
    """

    pieces: list[StreamOutput]
    output: RequestOutput | None
    is_last: bool
    error: Exception | None = None


class Mailbox:
    """Where one request's outputs wait until they are taken.

    Letters that are not taken are merged into one, and their event loop is told of them once, so
    that a slow reader or a busy event loop costs no more memory than its request.

    Attributes:
        wants_whole: whether its letters have the whole request, which is copied for each, or the
            pieces.
    """

    def __init__(self, *, wants_whole: bool) -> None:
        """Belong to the running event loop."""
        self.loop = asyncio.get_running_loop()
        self.wants_whole = wants_whole
        self._arrived = asyncio.Event()
        self._guard = threading.Lock()
        self._letter: Letter | None = None

    def put(self, letter: Letter) -> bool:
        """Add a letter, in any thread; return whether the event loop is to be told of it."""
        with self._guard:
            waiting, self._letter = self._letter, letter
            if waiting is not None:
                waiting.pieces.extend(letter.pieces)
                self._letter = replace(letter, pieces=waiting.pieces)
        return waiting is None

    def tell(self) -> None:
        """Let the reader know that there is a letter; in the mailbox's event loop."""
        self._arrived.set()

    async def take(self) -> Letter:
        """Wait for a letter.

        Raises:
            ChunkCacheError: what ended the request before its end.
        """
        await self._arrived.wait()
        self._arrived.clear()
        with self._guard:
            letter, self._letter = self._letter, None
        # The event is set for a letter alone, and there is one reader.
        assert letter is not None
        if letter.error is not None:
            raise letter.error
        return letter


def post(letters: Iterable[tuple[Mailbox, Letter]]) -> list[Mailbox]:
    """Bring letters to their mailboxes, with one call for each event loop.

    Returns:
        The mailboxes that do not exist any more, since their event loop is closed.
    """
    told: dict[asyncio.AbstractEventLoop, list[Mailbox]] = {}
    lost: list[Mailbox] = []
    for mailbox, letter in letters:
        if mailbox.loop.is_closed():
            lost.append(mailbox)
        elif mailbox.put(letter):
            told.setdefault(mailbox.loop, []).append(mailbox)
    for loop, mailboxes in told.items():
        try:
            loop.call_soon_threadsafe(_tell_all, mailboxes)
        except RuntimeError:
            lost += mailboxes
    return lost


def _tell_all(mailboxes: list[Mailbox]) -> None:
    for mailbox in mailboxes:
        mailbox.tell()


def news_of(request: Request, *, whole: bool) -> Letter | None:
    """Take what is new about a request, None if nothing is; between two steps of its engine."""
    pieces: list[StreamOutput] = []
    # One by one: another thread's step may add to them.
    while request.pieces:
        pieces.append(request.pieces.popleft())
    if request.error is not None:
        return Letter([] if whole else pieces, None, True, request.error)
    if not pieces:
        return None
    return letter_of(request, pieces, whole=whole, is_last=request.finished)


def letter_of(
    request: Request, pieces: list[StreamOutput], *, whole: bool, is_last: bool
) -> Letter:
    """Return a letter with a request's newest pieces, or with all of it."""
    if whole:
        return Letter([], snapshot(request.output), is_last)
    return Letter(pieces, None, is_last)


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
