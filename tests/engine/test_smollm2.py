"""The built-in model: a real tokenizer, real weights and real text."""

import pytest

from chunkcache.engine import LLM, SamplingParams
from chunkcache_testing.tiny_models import make_tokenizer

# The first use converts the model, which takes half a minute of its own.
pytestmark = pytest.mark.timeout(400)

MAX_TOKENS = 12
PARAMS = SamplingParams(max_tokens=MAX_TOKENS)
SYSTEM = {
    "role": "system",
    "content": "You answer questions about animals in one short sentence. " * 5,
}
CHATS = [
    [SYSTEM, {"role": "user", "content": question}]
    for question in ("How many legs has a spider?", "Where do penguins live?", "Do bats fly?")
]


@pytest.fixture(scope="module")
def smollm2() -> LLM:
    return LLM("smollm2-135m-instruct")


@pytest.mark.parametrize("sharing", [True, False])
def test_greedy_text_is_that_of_transformers(smollm2, expect_generated, sharing) -> None:
    llm = LLM(smollm2.model, smollm2.tokenizer, enable_prefix_sharing=sharing)
    for output in llm.generate(CHATS, PARAMS):
        expect_generated(
            llm.model, output.prompt_token_ids, output.outputs[0].token_ids, MAX_TOKENS
        )


def test_a_cached_prompt_gives_the_same_text(smollm2, expect_generated) -> None:
    smollm2.generate(CHATS[0], PARAMS)
    output = smollm2.generate(CHATS[0], PARAMS)[0]
    assert output.cached_tokens >= 64
    expect_generated(
        smollm2.model, output.prompt_token_ids, output.outputs[0].token_ids, MAX_TOKENS
    )


def test_the_end_of_a_turn_ends_the_answer(smollm2) -> None:
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    output = smollm2.generate(chat, SamplingParams(max_tokens=40))[0].outputs[0]
    assert (output.text, output.finish_reason) == ("The capital of France is Paris.", "stop")


def test_a_stop_string_across_tokens_ends_the_answer(smollm2) -> None:
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    output = smollm2.generate(chat, SamplingParams(max_tokens=40, stop="ance is Pa"))[0].outputs[0]
    assert output.text == "The capital of Fr"


def test_streamed_text_has_no_broken_characters(smollm2) -> None:
    prompt = "Emoji: 😀 😃 😄 😁 😆 😅 😂"
    params = SamplingParams(max_tokens=24)
    text = "".join(piece.text for piece in smollm2.generate(prompt, params, stream=True))
    assert text
    assert "\ufffd" not in text


def test_another_tokenizer_may_be_given(smollm2) -> None:
    llm = LLM(smollm2.model, make_tokenizer())
    assert llm.generate("abc", PARAMS)[0].prompt_token_ids == make_tokenizer()("abc")["input_ids"]
