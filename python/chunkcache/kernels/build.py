"""Compile the kernels with NVRTC at first use and keep the result on disk.

The sources are read from the repository's `cuda/` folder. A result is keyed by the sources, the
options and the compiler's version, so that it is never stale; the folder is
`$XDG_CACHE_HOME/chunkcache/kernels` (`~/.cache` without it).
"""

import hashlib
import logging
import os
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from chunkcache.errors import KernelError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Instance:
    """One entry point: a source file and the constants it is compiled with.

    Attributes:
        source: file in `cuda/`.
        name: the symbol.
        arch: `sm_90a` for machine code with Hopper's copy engine, `compute_80` for PTX that the
            driver compiles for sm_80 and newer.
        defines: macro names and values, sorted.
    """

    source: str
    name: str
    arch: str
    defines: tuple[tuple[str, str], ...]


def source_folder() -> Path:
    """Return the folder of the CUDA sources.

    Raises:
        KernelError: the folder is neither in the package nor beside it.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / "cuda", package.parents[2] / "cuda"):
        if (folder / "params.h").is_file():
            return folder
    raise KernelError(f"no CUDA sources in {package / 'cuda'} nor in {package.parents[2] / 'cuda'}")


@cache
def _sources_digest() -> bytes:
    digest = hashlib.sha256()
    folder = source_folder()
    for path in sorted(folder.rglob("*")):
        if path.suffix in {".h", ".cuh", ".cu"}:
            digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.digest()


def cache_folder() -> Path:
    """Return the folder of compiled kernels."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "chunkcache" / "kernels"


def compiled(instance: Instance) -> bytes:
    """Return the machine code or PTX of an instance, from the disk or freshly compiled.

    Raises:
        KernelError: NVRTC is missing, or the compilation failed (with the compiler's log).
    """
    nvrtc = _nvrtc()
    error, major, minor = nvrtc.nvrtcVersion()
    _check(nvrtc, error, "nvrtcVersion")
    key = hashlib.sha256(_sources_digest() + repr((instance, major, minor)).encode()).hexdigest()
    path = cache_folder() / f"{instance.name}-{key[:24]}"
    if path.is_file():
        return path.read_bytes()
    logger.info("compiling %s for %s with NVRTC %d.%d", instance.name, instance.arch, major, minor)
    code = _compile(nvrtc, instance)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        Path(file.name).replace(path)
    except OSError as problem:
        logger.warning("compiled kernels are not kept: %s", problem)
    return code


def _compile(nvrtc: Any, instance: Instance) -> bytes:
    folder = source_folder()
    options = [
        f"--gpu-architecture={instance.arch}",
        f"--include-path={folder}",
        "--std=c++17",
        "--generate-line-info",
        *(f"--define-macro={name}={value}" for name, value in instance.defines),
    ]
    text = (folder / instance.source).read_bytes()
    error, program = nvrtc.nvrtcCreateProgram(text, instance.source.encode(), 0, [], [])
    _check(nvrtc, error, "nvrtcCreateProgram")
    encoded = [option.encode() for option in options]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise KernelError(f"{instance.name} does not compile: {log.decode(errors='replace')}")
    machine_code = instance.arch.startswith("sm_")
    get_size = nvrtc.nvrtcGetCUBINSize if machine_code else nvrtc.nvrtcGetPTXSize
    get = nvrtc.nvrtcGetCUBIN if machine_code else nvrtc.nvrtcGetPTX
    error, size = get_size(program)
    _check(nvrtc, error, "size of the result")
    code: bytes = b" " * size
    (error,) = get(program, code)
    _check(nvrtc, error, "result")
    nvrtc.nvrtcDestroyProgram(program)
    return code


def _check(nvrtc: Any, error: Any, what: str) -> None:
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelError(f"NVRTC, {what}: {error}")


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as missing:
        raise KernelError(
            "the CUDA kernels need cuda-python and NVRTC: pip install 'chunkcache[cuda]'"
        ) from missing
    return nvrtc
