"""The forms in which prompts may come."""

import numpy as np
import pytest
import torch

from chunkcache import InvalidConfigError
from chunkcache.engine.prompts import tokenize

CHAT = [{"role": "user", "content": "hi"}]


def _ids(prompts, tokenizer=None) -> list[list[int]]:
    return [prompt.token_ids for prompt in tokenize(prompts, tokenizer, 300)]


def test_one_text(tokenizer) -> None:
    assert _ids("hi", tokenizer) == [tokenizer("hi")["input_ids"]]


def test_many_texts(tokenizer) -> None:
    assert _ids(["hi", "ho"], tokenizer) == [tokenizer(text)["input_ids"] for text in ("hi", "ho")]


@pytest.mark.parametrize(
    "prompt", [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3], dtype=np.uint32), torch.tensor([1, 2, 3])]
)
def test_one_list_of_ids(prompt) -> None:
    assert _ids(prompt) == [[1, 2, 3]]


def test_many_lists_of_ids() -> None:
    assert _ids([[1, 2], np.array([3])]) == [[1, 2], [3]]


def test_one_chat(tokenizer) -> None:
    assert _ids(CHAT, tokenizer) == [tokenizer("user: hi\nassistant: ")["input_ids"]]


def test_many_chats(tokenizer) -> None:
    assert _ids([CHAT, CHAT], tokenizer) == _ids(CHAT, tokenizer) * 2


def test_forms_may_be_mixed(tokenizer) -> None:
    assert len(_ids(["hi", [1, 2], CHAT], tokenizer)) == 3


def test_no_prompts() -> None:
    assert _ids([]) == []


@pytest.mark.parametrize("prompts", ["", [[]], [""], [[1], []]])
def test_an_empty_prompt_is_refused(tokenizer, prompts) -> None:
    with pytest.raises(InvalidConfigError, match="empty"):
        _ids(prompts, tokenizer)


@pytest.mark.parametrize("prompts", [b"hi", [b"hi"], bytearray(b"hi"), {1, 2}])
def test_bytes_and_sets_are_refused(prompts) -> None:
    with pytest.raises(InvalidConfigError, match="allowed is a text, a list of token ids"):
        _ids(prompts)


@pytest.mark.parametrize("token", [-1, 300, 2**32, True, "x"])
def test_a_wrong_token_id_is_refused(token) -> None:
    with pytest.raises(InvalidConfigError, match="prompt 1"):
        _ids([[1, 2], [1, token]])


@pytest.mark.parametrize("prompts", [7, None, {"role": "user"}, [None], [3.5]])
def test_another_type_is_refused(prompts) -> None:
    with pytest.raises(InvalidConfigError, match="allowed is"):
        _ids(prompts)


def test_text_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match="tokenizer"):
        _ids("hi")


def test_a_chat_without_a_template_is_refused(tokenizer) -> None:
    class Plain:
        chat_template = None

    with pytest.raises(InvalidConfigError, match="chat template"):
        _ids(CHAT, Plain())


def test_a_message_without_content_is_refused(tokenizer) -> None:
    with pytest.raises(InvalidConfigError, match="role and content"):
        _ids([{"role": "user"}], tokenizer)


@pytest.mark.parametrize("prompt", ["a\ud800b", [{"role": "user", "content": "a\ud800b"}]])
def test_half_characters_are_refused(tokenizer, prompt) -> None:
    with pytest.raises(InvalidConfigError, match=r"prompt 0 has .*allowed is text without lone"):
        _ids(prompt, tokenizer)


def test_a_chat_that_its_template_refuses_is_refused(tokenizer, monkeypatch) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(InvalidConfigError, match=r"prompt 0 is a chat .*: roles must alternate"):
        _ids(CHAT, tokenizer)
