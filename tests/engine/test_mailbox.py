"""Letters on their way from the engine's thread to a reader."""

import asyncio

import pytest

from chunkcache import EngineError
from chunkcache.engine import LLM, SamplingParams
from chunkcache.engine.mailbox import Letter, Mailbox, news_of, post
from chunkcache.engine.outputs import RequestOutput, StreamOutput

OUTPUT = RequestOutput(0, None, [1], [])


def _letter(number: int) -> Letter:
    return Letter([StreamOutput(0, 0, "", [number], None, OUTPUT)], None, False)


def test_a_busy_event_loop_is_told_of_its_letters_once(monkeypatch) -> None:
    async def main() -> tuple[int, Letter]:
        mailbox = Mailbox(wants_whole=False)
        told = []
        loop = asyncio.get_running_loop()
        original = loop.call_soon_threadsafe

        def counting(*args):
            told.append(args)
            return original(*args)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counting)
        for number in range(1000):
            post([(mailbox, _letter(number))])
        return len(told), await mailbox.take()

    num_told, letter = asyncio.run(main())
    assert num_told == 1
    assert [piece.token_ids for piece in letter.pieces] == [[number] for number in range(1000)]


def test_a_reader_that_has_taken_a_letter_is_told_of_the_next() -> None:
    async def main() -> list[list[int]]:
        mailbox = Mailbox(wants_whole=False)
        taken = []
        for number in range(3):
            post([(mailbox, _letter(number))])
            taken += [piece.token_ids[0] for piece in (await mailbox.take()).pieces]
        return taken

    assert asyncio.run(main()) == [0, 1, 2]


def test_a_reader_of_pieces_gets_no_copies_of_the_request(llama) -> None:
    llm = LLM(llama)
    (request,) = llm._requests([[1, 2, 3]], SamplingParams(max_tokens=4), "", 0, None, streams=True)
    llm.engine.add([request])
    while not request.pieces:
        llm.engine.step()
    tokens = list(request.output.outputs[0].token_ids)
    letter = news_of(request, whole=False)
    assert letter is not None
    assert letter.output is None
    assert [token for piece in letter.pieces for token in piece.token_ids] == tokens
    assert news_of(request, whole=True) is None
    while not request.finished:
        llm.engine.step()
    letter = news_of(request, whole=True)
    assert letter is not None
    assert letter.output == request.output
    assert letter.output is not request.output
    assert letter.pieces == []


def test_an_error_is_raised_at_the_reader() -> None:
    async def main() -> None:
        mailbox = Mailbox(wants_whole=False)
        post([(mailbox, _letter(0)), (mailbox, Letter([], None, True, EngineError("over")))])
        with pytest.raises(EngineError, match="over"):
            await mailbox.take()

    asyncio.run(main())


def test_a_mailbox_of_a_closed_event_loop_is_lost_whether_or_not_it_has_been_told() -> None:
    async def main() -> Mailbox:
        return Mailbox(wants_whole=False)

    mailbox = asyncio.run(main())
    assert post([(mailbox, _letter(0))]) == [mailbox]
    assert post([(mailbox, _letter(1))]) == [mailbox]
