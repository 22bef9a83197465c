"""What `LLM.generate` does beside equal text."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from chunkcache import EngineError, InvalidConfigError, OutOfChunksError
from chunkcache.engine import LLM, SamplingParams

GREEDY = SamplingParams(max_tokens=16)


def _tokens(outputs) -> list[list[int]]:
    return [output.token_ids for request in outputs for output in request.outputs]


def _is_idle(llm: LLM) -> bool:
    stats = llm.cache.stats()
    llm.cache.check_invariants()
    return stats.num_free + stats.num_evictable == stats.capacity


def test_outputs_come_in_the_order_of_the_prompts(llama, make_prompt) -> None:
    prompts = [make_prompt(5, seed=i) for i in range(3)]
    outputs = LLM(llama).generate(prompts, GREEDY)
    assert [output.prompt_token_ids for output in outputs] == prompts


def test_no_prompts_give_no_outputs(llama) -> None:
    assert LLM(llama).generate([], GREEDY) == []


def test_each_prompt_may_have_its_own_params(llama) -> None:
    params = [SamplingParams(max_tokens=2), SamplingParams(max_tokens=5)]
    outputs = LLM(llama).generate([[1], [2]], params)
    assert [len(tokens) for tokens in _tokens(outputs)] == [2, 5]


def test_params_for_another_number_of_prompts_are_refused(llama) -> None:
    with pytest.raises(InvalidConfigError, match="2 entries for 3 prompts"):
        LLM(llama).generate([[1], [2], [3]], [GREEDY, GREEDY])


def test_max_tokens_ends_with_length(llama) -> None:
    output = LLM(llama).generate([1, 2], GREEDY)[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (16, "length")


def test_the_models_length_ends_a_text(llama, make_prompt) -> None:
    prompt = make_prompt(30)
    llm = LLM(llama, max_model_len=40)
    output = llm.generate(prompt, SamplingParams(max_tokens=None))[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (10, "length")


def test_a_prompt_of_the_models_length_is_refused(llama, make_prompt) -> None:
    with pytest.raises(InvalidConfigError, match="40 tokens"):
        LLM(llama, max_model_len=40).generate(make_prompt(40), GREEDY)


def test_a_stop_id_ends_a_text_and_is_kept(llama) -> None:
    llm = LLM(llama)
    tokens = _tokens(llm.generate([1, 2], GREEDY))[0]
    end = tokens[5]
    output = llm.generate([1, 2], SamplingParams(stop_token_ids=[end]))[0].outputs[0]
    assert output.token_ids == tokens[: tokens.index(end) + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", end)


def test_the_end_of_sequence_ends_a_text_and_is_kept(llama) -> None:
    tokens = _tokens(LLM(llama).generate([1, 2], GREEDY))[0]
    llama.generation_config.eos_token_id = [tokens[4]]
    output = LLM(llama).generate([1, 2], GREEDY)[0].outputs[0]
    assert output.token_ids == tokens[: tokens.index(tokens[4]) + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)


def test_ignore_eos_goes_on(llama) -> None:
    tokens = _tokens(LLM(llama).generate([1, 2], GREEDY))[0]
    llama.generation_config.eos_token_id = tokens[4]
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    assert _tokens(LLM(llama).generate([1, 2], params))[0] == tokens


def test_the_text_is_that_of_the_tokens(llama, tokenizer) -> None:
    llama.get_output_embeddings().weight.data[256:] = 0
    llama.get_output_embeddings().weight.data[:, :] *= _printable(tokenizer)[:, None]
    output = LLM(llama, tokenizer).generate("hello", GREEDY)[0].outputs[0]
    assert output.text == tokenizer.decode(output.token_ids)


def test_a_stop_string_ends_the_text_before_it(llama, tokenizer) -> None:
    llama.get_output_embeddings().weight.data[:, :] *= _printable(tokenizer)[:, None]
    llm = LLM(llama, tokenizer)
    text = llm.generate("hello", GREEDY)[0].outputs[0].text
    stop = text[6:8]
    output = llm.generate("hello", SamplingParams(stop=stop))[0].outputs[0]
    assert output.text == text[: text.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_stop_strings_without_a_tokenizer_are_refused(llama) -> None:
    with pytest.raises(InvalidConfigError, match="tokenizer"):
        LLM(llama).generate([1], SamplingParams(stop="x"))


def test_streamed_pieces_add_up(llama, tokenizer) -> None:
    llm = LLM(llama, tokenizer)
    prompts = ["one", "two"]
    texts, tokens = ["", ""], [[], []]
    for piece in llm.generate(prompts, GREEDY, stream=True):
        texts[piece.request_index] += piece.text
        tokens[piece.request_index] += piece.token_ids
    outputs = llm.generate(prompts, GREEDY)
    assert texts == [request.outputs[0].text for request in outputs]
    assert tokens == _tokens(outputs)


def test_the_last_piece_says_why_it_is_the_last(llama) -> None:
    reasons = [piece.finish_reason for piece in LLM(llama).generate([1], GREEDY, stream=True)]
    assert reasons == [None] * 15 + ["length"]


def test_two_streams_may_be_read_in_turns(llama) -> None:
    llm = LLM(llama)
    streams = [llm.generate(prompt, GREEDY, stream=True) for prompt in ([1, 2], [3, 4])]
    pieces = list(zip(*streams, strict=True))
    tokens = [[piece[i].token_ids[0] for piece in pieces] for i in range(2)]
    assert tokens == _tokens(llm.generate([[1, 2], [3, 4]], GREEDY))


def test_two_threads_may_generate_at_once(llama, make_prompt) -> None:
    llm = LLM(llama, chunk_size=16)
    prompts = [[make_prompt(40, seed=i + 5 * j) for i in range(3)] for j in range(2)]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda own: _tokens(llm.generate(own, GREEDY)), prompts))
    alone = LLM(llama, chunk_size=16)
    assert together == [_tokens(alone.generate(own, GREEDY)) for own in prompts]


def test_another_thread_joins_while_one_generates(llama, make_prompt) -> None:
    llm = LLM(llama, chunk_size=16)
    long = llm.generate(make_prompt(40), SamplingParams(max_tokens=400), stream=True)
    with ThreadPoolExecutor(1) as pool:
        next(long)
        other = pool.submit(llm.generate, make_prompt(40, seed=1), GREEDY)
        num_after = 0
        for _ in long:
            num_after += other.done()
        assert num_after > 0


@pytest.mark.parametrize("num_pieces", [0, 1, 5])
def test_a_stream_that_is_closed_leaves_nothing_behind(llama, make_prompt, num_pieces) -> None:
    llm = LLM(llama, chunk_size=16, max_num_seqs=2)
    stream = llm.generate([make_prompt(40, seed=i) for i in range(4)], GREEDY, stream=True)
    for _ in range(num_pieces):
        next(stream)
    stream.close()
    assert _is_idle(llm)


def test_a_failed_step_leaves_nothing_behind(llama, make_prompt, monkeypatch) -> None:
    llm = LLM(llama, chunk_size=16)
    stream = llm.generate([make_prompt(40, seed=i) for i in range(3)], GREEDY, stream=True)
    next(stream)
    monkeypatch.setattr(llama.lm_head, "forward", lambda _: 1 / 0)
    with pytest.raises(EngineError, match="the model step failed: ZeroDivisionError"):
        list(stream)
    assert _is_idle(llm)


def test_an_engine_goes_on_after_a_failed_step(llama, monkeypatch) -> None:
    llm = LLM(llama)
    expected = _tokens(llm.generate([1, 2], GREEDY))
    with monkeypatch.context() as patch:
        patch.setattr(llama.lm_head, "forward", lambda _: 1 / 0)
        with pytest.raises(EngineError):
            llm.generate([1, 2], GREEDY)
    assert _tokens(llm.generate([1, 2], GREEDY)) == expected


def test_the_model_is_left_as_it_was(llama) -> None:
    ids = torch.tensor([[1, 2, 3]])
    before = llama(ids).logits
    LLM(llama).generate([1, 2, 3], GREEDY)
    torch.testing.assert_close(llama(ids).logits, before, rtol=0, atol=0)


def test_no_step_is_left_when_texts_end_by_a_token(llama) -> None:
    llm = LLM(llama, chunk_size=16)
    end = _tokens(llm.generate([1, 2], GREEDY))[0][3]
    for _ in range(20):
        llm.generate([1, 2], SamplingParams(stop_token_ids=[end]))
        # A step of the engine in another thread would get in the way of this.
        assert llama.config._attn_implementation == "eager"
        assert _is_idle(llm)


def test_two_fresh_engines_give_the_same_bits(llama, make_prompt) -> None:
    prompts = [make_prompt(20 + i, seed=i) for i in range(3)]
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=1)
    assert _tokens(LLM(llama).generate(prompts, params)) == _tokens(
        LLM(llama).generate(prompts, params)
    )


def test_the_progress_bar_goes_to_standard_error(llama, capsys) -> None:
    LLM(llama).generate([[1], [2]], GREEDY, progress=True)
    captured = capsys.readouterr()
    assert (captured.out, "2/2" in captured.err) == ("", True)


def test_without_a_terminal_there_is_no_progress_bar(llama, capsys) -> None:
    LLM(llama).generate([[1], [2]], GREEDY)
    assert capsys.readouterr().err == ""


def test_what_can_never_fit_is_refused_with_the_sizes(llama, make_prompt) -> None:
    llm = LLM(llama, chunk_size=16, capacity=4)
    with pytest.raises(OutOfChunksError) as caught:
        llm.generate([[1], make_prompt(60)], SamplingParams(max_tokens=6))
    assert (caught.value.needed, caught.value.free) == (5, 4)
    assert llm.stats.num_steps == 0


def test_what_just_fits_is_served(llama, make_prompt) -> None:
    llm = LLM(llama, chunk_size=16, capacity=4)
    output = llm.generate(make_prompt(60), SamplingParams(max_tokens=5))[0].outputs[0]
    assert len(output.token_ids) == 5


def test_bfloat16_and_float16_run(build_model, llama, make_prompt) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        llm = LLM(llama.to(dtype), chunk_size=16)
        assert llm.spec.dtype == str(dtype).removeprefix("torch.")
        assert len(_tokens(llm.generate(make_prompt(40), GREEDY))[0]) == 16


def _printable(tokenizer) -> torch.Tensor:
    """Return 1 for the tokens of printable ASCII characters, 0 for the others."""
    keep = torch.zeros(300)
    for code in range(33, 127):
        keep[tokenizer(chr(code))["input_ids"][0]] = 1
    return keep
