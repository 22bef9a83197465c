"""GGUF models: converted once to safetensors plus tokenizer, and kept in a cache folder.

Reading a GGUF file through transformers dequantises it tensor by tensor and rebuilds the tokenizer,
which takes far longer than loading the result. The folder is ``$XDG_CACHE_HOME/chunkcache``
(``~/.cache/chunkcache`` without that variable); deleting it is safe.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from chunkcache.engine.quiet import without_progress_bars
from chunkcache.errors import InvalidConfigError

# Part of each folder's name: raise it when a conversion would write something else than before.
_FORMAT = 1


def cache_root() -> Path:
    """Return the folder that keeps the converted models."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "chunkcache" / "models"


def converted(file: Path) -> Path:
    """Return a folder with ``file`` as safetensors, config and tokenizer, converting it if needed.

    The folder appears whole or not at all: it is written under another name and renamed, so that
    an interrupted conversion, or two at once, leave nothing half done.

    Raises:
        InvalidConfigError: transformers cannot read the file.
    """
    folder = cache_root() / f"{file.stem}-{_fingerprint(file)}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with without_progress_bars():
            _convert(file, partial)
        try:
            partial.rename(folder)
        except OSError:
            # Another process finished the same conversion first.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _fingerprint(file: Path) -> str:
    stat = file.stat()
    key = f"{_FORMAT}:{file.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def _convert(file: Path, folder: Path) -> None:
    import torch
    import transformers

    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(
                f"reading {file.name} needs the package {package}: pip install 'chunkcache[hf]'",
                name=package,
            )
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": file.parent,
        "gguf_file": file.name,
        "local_files_only": True,
    }
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
        quantised = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # transformers raises NotImplementedError for tensor types that it cannot dequantise.
    except (OSError, ValueError, NotImplementedError) as error:
        raise InvalidConfigError(f"model {file}: {error}") from error
    # The loaded model counts as quantised although its weights are plain floats; a fresh one of
    # the same configuration saves and loads as any other.
    config = type(quantised.config).from_dict(
        {k: v for k, v in quantised.config.to_dict().items() if k != "quantization_config"}
    )
    model = type(quantised)(config)
    model.load_state_dict(quantised.state_dict())
    model.generation_config = quantised.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
