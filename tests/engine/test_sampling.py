"""What sampling parameters do to whole texts, whatever else the engine does meanwhile."""

import pytest
import torch

from chunkcache import InvalidConfigError
from chunkcache.engine import LLM, SamplingParams

EVERYTHING = {
    "max_tokens": 40,
    "temperature": 0.9,
    "min_p": 0.01,
    "top_k": 60,
    "top_p": 0.95,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.2,
    "repetition_penalty": 1.2,
    "logit_bias": {7: 2.5, 9: -3.0},
    "min_tokens": 5,
}


def _tokens(outputs) -> list[list[int]]:
    return [output.token_ids for request in outputs for output in request.outputs]


def _plain(model, prompt: list[int], num_tokens: int, adjust) -> list[int]:
    """Generate greedily by whole forward passes, with logits changed by ``adjust``."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        with torch.inference_mode():
            logits = model(torch.tensor([tokens])).logits[0, -1].double()
        tokens.append(int(adjust(logits, tokens[len(prompt) :]).argmax()))
    return tokens[len(prompt) :]


def _penalised(logits: torch.Tensor, generated: list[int]) -> torch.Tensor:
    counts = torch.bincount(torch.tensor(generated, dtype=torch.long), minlength=300)
    return logits - 1.5 * counts - 0.5 * (counts > 0)


def test_penalties_make_the_text_of_a_plain_loop(llama, make_prompt) -> None:
    params = SamplingParams(max_tokens=20, frequency_penalty=1.5, presence_penalty=0.5)
    prompts = [make_prompt(9, seed=i) for i in range(3)]
    expected = [_plain(llama, prompt, 20, _penalised) for prompt in prompts]
    assert _tokens(LLM(llama).generate(prompts, params)) == expected


@pytest.mark.parametrize("sharing", [True, False])
def test_a_text_does_not_depend_on_the_batch(llama, make_prompt, sharing) -> None:
    params = SamplingParams(seed=11, n=2, **EVERYTHING)
    others = SamplingParams(max_tokens=9, temperature=1.5, presence_penalty=2)
    prompts = [make_prompt(30, seed=5), make_prompt(9), make_prompt(3, seed=6)]
    options = {"chunk_size": 16, "enable_prefix_sharing": sharing}
    alone = _tokens(LLM(llama, **options).generate(prompts[1], params))
    together = LLM(llama, **options).generate(prompts, [others, params, others])
    later = LLM(llama, max_num_seqs=2, max_num_batched_tokens=7, **options)
    assert _tokens(together[1:2]) == alone
    assert _tokens(later.generate(prompts, [others, params, others])[1:2]) == alone


@pytest.mark.parametrize("greedy", [True, False])
def test_a_text_does_not_depend_on_preemption(llama, make_prompt, greedy) -> None:
    prompts = [make_prompt(30, seed=i) for i in range(5)]
    params = [
        SamplingParams(**{**EVERYTHING, "temperature": 0.0 if greedy else 0.9}, seed=i)
        for i in range(5)
    ]
    tight = LLM(llama, chunk_size=16, capacity=12)
    roomy = LLM(llama, chunk_size=16).generate(prompts, params)
    assert _tokens(tight.generate(prompts, params)) == _tokens(roomy)
    assert tight.stats.num_preemptions > 0


def test_the_first_of_n_samples_is_the_single_sample(llama, make_prompt) -> None:
    params = {"seed": 3, **EVERYTHING}
    many = LLM(llama).generate(make_prompt(20), SamplingParams(n=3, **params))
    one = LLM(llama).generate(make_prompt(20), SamplingParams(**params))
    assert _tokens(many)[:1] == _tokens(one)


def test_a_bias_forces_a_token(llama) -> None:
    params = SamplingParams(max_tokens=4, logit_bias={17: 100})
    assert _tokens(LLM(llama).generate([1, 2], params)) == [[17] * 4]


def test_a_bias_for_a_token_that_the_model_lacks_is_refused(llama) -> None:
    with pytest.raises(InvalidConfigError, match=r"logit_bias is \{300: 1.0\}; .* below 300"):
        LLM(llama).generate([1], SamplingParams(logit_bias={300: 1}))


@pytest.mark.parametrize("way", ["eos", "stop_token_ids"])
def test_min_tokens_come_before_the_end(llama, way) -> None:
    # Both ends are wanted at every step.
    bias = {4: 100, 6: 90}
    llama.generation_config.eos_token_id = [4] if way == "eos" else None
    stop_token_ids = [4] if way == "stop_token_ids" else []
    params = SamplingParams(min_tokens=3, logit_bias=bias, stop_token_ids=stop_token_ids)
    output = LLM(llama).generate([1, 2], params)[0].outputs[0]
    assert (output.token_ids, output.finish_reason) == ([6, 6, 6, 4], "stop")


def _text_model(llama, tokenizer, text: str):
    """Make a model that repeats ``text``, one byte a token, by the last token alone."""
    ids = tokenizer(text)["input_ids"]
    assert len(set(ids)) == len(ids) < 64
    with torch.no_grad():
        embedding, head = llama.get_input_embeddings(), llama.get_output_embeddings()
        embedding.weight.zero_()
        head.weight.zero_()
        # A model without any logits would not be served.
        embedding.weight[:, -1] = 0.1
        head.weight[:, -1] = torch.linspace(0, 0.01, 300)
        for position, token in enumerate(ids):
            embedding.weight[token, position] = 1
            head.weight[ids[(position + 1) % len(ids)], position] = 1
        for layer in llama.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return LLM(llama, tokenizer)


@pytest.mark.parametrize(
    ("params", "text", "reason"),
    [
        ({"stop": "def"}, "bc", "def"),
        ({"stop": ["zzz", "cde", "def"]}, "b", "cde"),
        ({"stop": ["cdefg", "de"]}, "bc", "de"),
        ({"stop": "€f", "max_tokens": 9}, "bcdefghab", None),
        ({"stop": "def", "include_stop_str_in_output": True}, "bcdef", "def"),
        ({"stop": "cd", "min_tokens": 3}, "bcdefghab", "cd"),
        ({"stop": "cd", "min_tokens": 2}, "b", "cd"),
        ({"stop": "de", "max_tokens": 4}, "bc", "de"),
        ({"stop": "de", "max_tokens": 3}, "bcd", None),
    ],
)
def test_stop_strings_end_the_text(llama, tokenizer, params, text, reason) -> None:
    llm = _text_model(llama, tokenizer, "abcdefgh")
    output = llm.generate("a", SamplingParams(**params))[0].outputs[0]
    assert (output.text, output.stop_reason) == (text, reason)
    assert output.finish_reason == ("length" if reason is None else "stop")


@pytest.mark.parametrize(
    ("stop", "text"), [("€", "x"), ("€y", "x"), ("x€", ""), ("y", "x€"), ("\u20ad", None)]
)
def test_stop_strings_work_across_the_bytes_of_a_character(llama, tokenizer, stop, text) -> None:
    llm = _text_model(llama, tokenizer, "wx€y")
    output = llm.generate("w", SamplingParams(stop=stop, max_tokens=8))[0].outputs[0]
    assert output.text == ("x€ywx" if text is None else text)


def test_a_text_that_ends_within_a_character_leaves_it_out(llama, tokenizer) -> None:
    llm = _text_model(llama, tokenizer, "wx€y")
    output = llm.generate("w", SamplingParams(stop="€", max_tokens=3))[0].outputs[0]
    assert (output.text, output.finish_reason) == ("x", "length")
