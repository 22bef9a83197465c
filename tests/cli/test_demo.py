"""The demo command, on a model small enough for a test."""

import json

import pytest
from typer.testing import CliRunner

from chunkcache.cli.app import app
from chunkcache.cli.demo.inputs import load_inputs
from chunkcache_testing.tiny_models import CONFIGS, make_model, make_tokenizer

PROMPT = "You are a helpful agent of a small shop. Be short and friendly, please. " * 2
QUESTIONS = ["Where is it?", "Is it open?", "May I?"]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model(CONFIGS["llama"]()).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def arguments(model_folder, tmp_path) -> list[str]:
    (tmp_path / "prompt.txt").write_text(PROMPT)
    (tmp_path / "questions.txt").write_text("\n\n".join(QUESTIONS))
    return [
        "demo",
        *("--model", str(model_folder)),
        *("--prompt", str(tmp_path / "prompt.txt")),
        *("--questions", str(tmp_path / "questions.txt")),
        *("--output", str(tmp_path / "plots" / "demo.png")),
        *("--max-tokens", "6"),
    ]


def test_json_is_all_that_standard_output_gets(arguments) -> None:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["num_users"] == 3


def test_sharing_computes_the_system_prompt_once(arguments) -> None:
    figures = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    shared, total = figures["shared_prefix_tokens"], figures["prompt_tokens"]
    assert shared > len(PROMPT)
    assert figures["sharing_on"]["prompt_tokens_computed"] == total - 2 * shared
    assert figures["sharing_off"]["prompt_tokens_computed"] == total


def test_both_halves_give_the_same_answers(arguments) -> None:
    figures = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert figures["equal_answers"] == 3


def test_ratios_are_those_of_the_figures(arguments) -> None:
    figures = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    for key, ratio in figures["ratio_off_to_on"].items():
        expected = figures["sharing_off"][key] / figures["sharing_on"][key]
        assert ratio == pytest.approx(expected)


def test_answers_of_one_token_leave_the_decoding_unmeasured(arguments) -> None:
    arguments[arguments.index("--max-tokens") + 1] = "1"
    figures = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert figures["ratio_off_to_on"]["decode_ms_per_token"] is None


def test_the_report_names_every_figure(arguments) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    for text in (
        "prompt tokens computed",
        "time to first token",
        "decode",
        "K/V held",
        "sharing on",
        "sharing off",
        "Prefix tree",
        *QUESTIONS,
    ):
        assert text in result.stdout


def test_the_plot_is_a_png(arguments, tmp_path) -> None:
    CliRunner().invoke(app, arguments)
    assert (tmp_path / "plots" / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_an_error_is_one_line_and_a_failure(arguments) -> None:
    arguments[arguments.index("--model") + 1] = "no-such-model"
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "no-such-model" in result.stderr
    assert "Traceback" not in result.output


def test_an_empty_questions_file_is_refused(arguments, tmp_path) -> None:
    (tmp_path / "questions.txt").write_text("\n \n")
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "questions" in result.stderr


def test_the_demo_brings_sixteen_different_questions() -> None:
    assert len(set(load_inputs(None, None).questions)) == 16


def test_the_version_is_shown() -> None:
    import chunkcache

    assert CliRunner().invoke(app, ["--version"]).stdout.strip() == chunkcache.__version__
