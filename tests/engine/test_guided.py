"""Output that keeps to a JSON schema, a regular expression or a choice."""

import json
import re
from typing import Any

import jsonschema
import pytest

from chunkcache import EngineError, InvalidConfigError
from chunkcache.engine import LLM, SamplingParams, guided

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "né", "日本"]}, "maxItems": 3},
        "next": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "tags", "next"],
    "additionalProperties": False,
    # Random models would write spaces for ever.
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.fixture
def llm(llama, tokenizer) -> LLM:
    return LLM(llama, tokenizer, chunk_size=16)


def _check_json(output, schema: dict[str, Any] = PERSON) -> None:
    assert output.finish_reason == "stop"
    jsonschema.validate(json.loads(output.text), schema)


@pytest.mark.parametrize("schema", [PERSON, json.dumps(PERSON)])
def test_json_output_parses_and_validates(llm, schema) -> None:
    params = SamplingParams(temperature=1.5, seed=1, n=8, max_tokens=200, guided_json=schema)
    outputs = llm.generate("Who?", params)[0].outputs
    for output in outputs:
        _check_json(output)
    assert len({output.text for output in outputs}) == 8


@pytest.mark.parametrize(
    "others",
    [
        {"repetition_penalty": 2.0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"logit_bias": {256: 100, 65: -100, 32: 100}},
        {"min_p": 0.5, "top_k": 3, "top_p": 0.5},
        {"min_tokens": 190},
        {"ignore_eos": True},
        {"logprobs": 2, "prompt_logprobs": 2},
        {"skip_special_tokens": False},
        {"stop": ["@#"]},
    ],
)
def test_json_output_goes_with_other_parameters(llm, others) -> None:
    params = {"temperature": 1.2, "seed": 3, "n": 2, "max_tokens": 200}
    request = llm.generate("?", SamplingParams(**params, **others, guided_json=PERSON))[0]
    for output in request.outputs:
        _check_json(output)


def test_json_output_without_sampling(llm) -> None:
    _check_json(llm.generate("?", SamplingParams(max_tokens=200, guided_json=PERSON))[0].outputs[0])


def test_json_output_survives_preemption(llama, tokenizer, make_prompt) -> None:
    prompts = [make_prompt(30, seed=i) for i in range(5)]
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=100, guided_json=PERSON)
    tight = LLM(llama, tokenizer, chunk_size=16, capacity=12)
    roomy = LLM(llama, tokenizer, chunk_size=16).generate(prompts, params)
    outputs = tight.generate(prompts, params)
    assert tight.stats.num_preemptions > 0
    assert [o.outputs[0].text for o in outputs] == [o.outputs[0].text for o in roomy]
    for output in outputs:
        _check_json(output.outputs[0])


def test_guided_and_free_requests_go_together(llm) -> None:
    free = SamplingParams(max_tokens=9)
    guided = SamplingParams(max_tokens=200, guided_json=PERSON)
    alone = llm.generate("?", free)[0].outputs[0].token_ids
    first, second = llm.generate(["?", "?"], [free, guided])
    assert first.outputs[0].token_ids == alone
    _check_json(second.outputs[0])


def test_a_number_ends_by_the_end_of_sequence(llama, tokenizer) -> None:
    llama.generation_config.eos_token_id = 256
    params = SamplingParams(
        max_tokens=50, temperature=1.0, seed=1, logit_bias={256: 5}, guided_json={"type": "integer"}
    )
    output = LLM(llama, tokenizer).generate("?", params)[0].outputs[0]
    assert output.token_ids[-1] == 256
    _check_json(output, {"type": "integer"})


def test_what_max_tokens_cuts_is_not_called_finished(llm) -> None:
    output = llm.generate("?", SamplingParams(max_tokens=5, guided_json=PERSON))[0].outputs[0]
    assert (output.finish_reason, len(output.token_ids)) == ("length", 5)


def test_a_stop_string_ends_a_guided_text(llm) -> None:
    params = SamplingParams(max_tokens=200, stop='"age"', guided_json=PERSON)
    output = llm.generate("?", params)[0].outputs[0]
    assert (output.finish_reason, output.stop_reason) == ("stop", '"age"')
    assert output.text.endswith('",')


def test_a_regular_expression_is_matched_whole(llm) -> None:
    regex = r"[a-f]{3}-[0-9]+(x|yz)"
    params = SamplingParams(temperature=1.0, seed=1, n=6, max_tokens=100, guided_regex=regex)
    for output in llm.generate("?", params)[0].outputs:
        assert output.finish_reason == "stop"
        assert re.fullmatch(regex, output.text)


def test_one_of_the_choices_comes_out(llm) -> None:
    choices = ["yes", "no", 'né "so"\n', "日本", "a/b\\"]
    params = SamplingParams(temperature=1.5, seed=1, n=20, guided_choice=choices)
    texts = {output.text for output in llm.generate("?", params)[0].outputs}
    assert texts <= set(choices)
    assert len(texts) > 2


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("guided_json", {"type": "nonsense"}, "Invalid type: nonsense"),
        ("guided_json", {"type": "array", "uniqueItems": True}, "uniqueItems"),
        ("guided_json", {"$ref": "#/nowhere"}, "nowhere"),
        ("guided_regex", "((", "unclosed group"),
    ],
)
def test_what_cannot_be_compiled_is_refused_alone(llm, name, value, reason) -> None:
    stream = llm.generate("go on", SamplingParams(max_tokens=8), stream=True)
    next(stream)
    with pytest.raises(InvalidConfigError, match=f"(?s){name} is .*{reason}"):
        llm.generate("?", SamplingParams(**{name: value}))
    assert len(list(stream)) == 7


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"guided_json": "{"}, "guided_json is '{'"),
        ({"guided_json": [1]}, "guided_json is"),
        ({"guided_json": {"a": {1, 2}}}, "guided_json is"),
        ({"guided_regex": 1}, "guided_regex is 1"),
        ({"guided_choice": []}, "guided_choice is"),
        ({"guided_choice": "yes"}, "guided_choice is 'yes'"),
        ({"guided_choice": ["a", ""]}, "guided_choice is"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex and guided_choice are given"),
    ],
)
def test_bad_guides_are_refused_by_name(params, message) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        SamplingParams(**params)


def test_without_a_tokenizer_it_is_refused(llama) -> None:
    with pytest.raises(InvalidConfigError, match="guided_regex is given, but there is no"):
        LLM(llama).generate([1], SamplingParams(guided_regex="a"))


def test_without_the_library_the_extra_is_named(llm, monkeypatch) -> None:
    monkeypatch.setattr(guided, "find_spec", lambda _: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'chunkcache\[guided\]'"):
        llm.generate("?", SamplingParams(guided_regex="a"))


def test_a_model_of_few_tokens_uses_those_it_has(tokenizer, build_model, llama) -> None:
    llama.config.vocab_size = 200
    small = build_model(llama.config)
    request = LLM(small, tokenizer).generate([1], SamplingParams(guided_choice=["abc"]))[0]
    assert request.outputs[0].text == "abc"


def test_a_tokenizer_without_an_end_token_will_do(llama, tokenizer) -> None:
    plain = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer)
    assert plain.eos_token_id is None
    params = SamplingParams(temperature=1.0, seed=1, n=8, guided_choice=["!", "!?"])
    outputs = LLM(llama, plain).generate([1], params)[0].outputs
    assert {output.text for output in outputs} == {"!", "!?"}


def test_no_logits_left_fails_the_request(tokenizer, build_model, llama) -> None:
    llama.config.vocab_size = 60
    small = LLM(build_model(llama.config), tokenizer)
    with pytest.raises(EngineError, match="no token that may come next"):
        small.generate([1], SamplingParams(guided_choice=["abc"]))


def test_min_tokens_come_before_the_end_of_what_could_go_on(llm) -> None:
    # 256 ends a text, and is wanted at every step.
    params = {"max_tokens": 50, "logit_bias": {256: 100}, "guided_regex": "[0-9]+"}
    lengths = [
        len(llm.generate("?", SamplingParams(min_tokens=number, **params))[0].outputs[0].token_ids)
        for number in (0, 6)
    ]
    assert lengths == [2, 7]
