"""Where models come from."""

import pytest

from chunkcache import InvalidConfigError
from chunkcache.engine import LLM, SamplingParams, gguf, loader
from chunkcache_testing.tiny_models import CONFIGS, make_model, make_tokenizer


@pytest.fixture
def model_folder(tmp_path):
    make_model(CONFIGS["llama"]()).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_gives_model_and_tokenizer(model_folder, llama) -> None:
    params = SamplingParams(max_tokens=8)
    loaded = LLM(model_folder).generate("hello", params)
    given = LLM(llama, make_tokenizer()).generate("hello", params)
    assert loaded[0].outputs[0] == given[0].outputs[0]


def test_a_folder_without_a_tokenizer_serves_token_ids(model_folder) -> None:
    for file in [*model_folder.glob("tokenizer*"), *model_folder.glob("chat_template*")]:
        file.unlink()
    output = LLM(str(model_folder)).generate([1, 2], SamplingParams(max_tokens=3))[0].outputs[0]
    assert (len(output.token_ids), output.text) == (3, "")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_folder_is_loaded_in_the_wanted_dtype(model_folder, dtype) -> None:
    assert LLM(model_folder, dtype=dtype).spec.dtype == dtype


def test_an_unknown_dtype_is_refused(model_folder) -> None:
    with pytest.raises(InvalidConfigError, match="int3"):
        LLM(model_folder, dtype="int3")


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match="not downloaded"):
        LLM("some-org/some-model")


def test_a_folder_without_a_model_is_refused(tmp_path) -> None:
    with pytest.raises(InvalidConfigError, match=r"config\.json"):
        LLM(tmp_path)


def test_a_broken_configuration_is_refused(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(InvalidConfigError, match="no-such-model"):
        LLM(tmp_path)


def test_converted_models_lie_in_the_users_cache(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert gguf.cache_root().is_relative_to(tmp_path)


def test_a_conversion_is_done_once(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    calls = []
    monkeypatch.setattr(gguf, "_convert", lambda file, folder: calls.append(file))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert loader.resolve(file) == loader.resolve(tmp_path)
    assert calls == [file]


def test_a_failed_conversion_leaves_nothing_behind(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"no model")
    with pytest.raises(InvalidConfigError, match=r"model\.gguf"):
        loader.resolve(file)
    assert list(gguf.cache_root().iterdir()) == []


def test_two_gguf_files_in_a_folder_are_refused(tmp_path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(InvalidConfigError, match=r"2 \.gguf files"):
        loader.resolve(tmp_path)
