"""Token ids to text, piece by piece."""

import pytest

from chunkcache.engine.detokenizer import Detokenizer, StopStrings

TEXTS = ["plain words", "né à Zürich", "日本語と한국어", "family: 👨‍👩‍👧‍👦 done", " leading space"]


class _ByteTokenizer:
    """Its tokens are strings of bytes."""

    def decode(self, tokens, **_) -> str:
        return b"".join(tokens).decode(errors="replace")


def _pieces(tokenizer, token_ids) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*map(detokenizer.push, token_ids), detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_add_up_to_the_text(tokenizer, text) -> None:
    assert "".join(_pieces(tokenizer, tokenizer(text)["input_ids"])) == text


@pytest.mark.parametrize("text", TEXTS)
def test_no_piece_has_a_broken_character(tokenizer, text) -> None:
    assert not any("\ufffd" in piece for piece in _pieces(tokenizer, tokenizer(text)["input_ids"]))


@pytest.mark.parametrize("text", [*TEXTS, "broken \ufffd", ""])
def test_all_at_once_make_the_text_that_they_make_one_by_one(tokenizer, text) -> None:
    token_ids = tokenizer(text)["input_ids"]
    for end in range(len(token_ids) + 1):
        detokenizer = Detokenizer(tokenizer)
        at_once = detokenizer.push(*token_ids[:end]) + detokenizer.finish()
        assert at_once == "".join(_pieces(tokenizer, token_ids[:end]))


def test_bytes_that_are_no_text_come_out_as_one_by_one(tokenizer) -> None:
    stray = tokenizer("é")["input_ids"][1]
    token_ids = [stray] * 20 + tokenizer("after 👍")["input_ids"] + [stray] * 5
    detokenizer = Detokenizer(tokenizer)
    at_once = detokenizer.push(*token_ids) + detokenizer.finish()
    assert at_once == "".join(_pieces(tokenizer, token_ids))


def test_an_incomplete_character_at_the_end_is_left_out(tokenizer) -> None:
    assert "".join(_pieces(tokenizer, tokenizer("ok 👍")["input_ids"][:-1])) == "ok "


def test_bytes_that_are_no_text_do_not_hold_back_what_follows(tokenizer) -> None:
    stray = tokenizer("é")["input_ids"][1]
    text = "".join(_pieces(tokenizer, [stray] * 40 + tokenizer("after")["input_ids"]))
    assert text.endswith("after")


def test_special_tokens_are_left_out(tokenizer) -> None:
    token_ids = [*tokenizer("a")["input_ids"], tokenizer.eos_token_id]
    assert "".join(_pieces(tokenizer, token_ids)) == "a"


def test_special_tokens_are_kept_if_wished(tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    assert detokenizer.push(tokenizer.eos_token_id) == "<end>"


def test_a_stop_string_in_one_piece_ends_the_text() -> None:
    stop = StopStrings(["END"])
    assert stop.push("one END two") == "one "
    assert stop.matched == "END"


def test_a_stop_string_across_pieces_ends_the_text() -> None:
    stop = StopStrings(["END"])
    assert [stop.push(piece) for piece in ["one E", "N", "D two"]] == ["one ", "", ""]
    assert stop.matched == "END"


def test_what_stands_before_an_incomplete_character_is_shown() -> None:
    detokenizer = Detokenizer(_ByteTokenizer())
    assert [detokenizer.push(piece) for piece in (b"END\xe2", b"\x82", b"\xac!")] == [
        "END",
        "",
        "€!",
    ]


def test_the_stop_string_that_is_complete_first_counts_wherever_borders_fall() -> None:
    for pieces in (["later"], ["lat", "er"], ["l", "a", "t", "e", "r"]):
        stop = StopStrings(["later", "at"])
        shown = ""
        while stop.matched is None:
            shown += stop.push(pieces.pop(0))
        assert shown == "l"
        assert stop.matched == "at"


def test_of_stop_strings_that_end_together_the_longest_counts() -> None:
    stop = StopStrings(["ter", "later", "r"])
    assert stop.push("the later") == "the "
    assert stop.matched == "later"


@pytest.mark.parametrize("pieces", [["one END two"], ["one E", "N", "D two"]])
def test_a_stop_string_may_be_included(pieces) -> None:
    stop = StopStrings(["END"], include=True)
    assert "".join(map(stop.push, pieces)) == "one END"
    assert stop.matched == "END"


def test_a_stop_string_that_is_complete_too_early_is_shown() -> None:
    stop = StopStrings(["END"])
    pieces = [stop.push("END E", counts=False), stop.push("N", counts=False), stop.push("D x END")]
    assert pieces == ["END ", "", ""]
    assert stop.matched == "END"


def test_a_stop_string_inside_a_held_beginning_that_came_too_early_does_not_count() -> None:
    stop = StopStrings(["xENDy", "END"])
    assert [stop.push("xEND", counts=False), stop.push("z")] == ["", "xENDz"]
    assert stop.matched is None


def test_a_beginning_that_goes_on_otherwise_is_shown() -> None:
    stop = StopStrings(["END"])
    assert [stop.push(piece) for piece in ["one EN", "ough"]] == ["one ", "ENough"]


def test_a_repeated_beginning_is_held_back() -> None:
    stop = StopStrings(["aab"])
    assert [stop.push(piece) for piece in ["aa", "a", "b"]] == ["", "a", ""]
    assert stop.matched == "aab"


def test_the_stop_string_that_begins_first_counts() -> None:
    stop = StopStrings(["later", "ear"])
    assert stop.push("the ear later") == "the "
    assert stop.matched == "ear"


def test_held_text_comes_out_at_the_end() -> None:
    stop = StopStrings(["END"])
    assert stop.push("one EN") + stop.finish() == "one EN"
