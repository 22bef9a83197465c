"""Compiled kernels: the PTX that a wheel carries, or what NVRTC makes at first use.

PTX in the package is used if it was made from the sources beside it. Else NVRTC compiles those,
and the result is kept on disk, in `$XDG_CACHE_HOME/chunkcache/kernels` (`~/.cache` without it),
keyed by the sources, the options and the compiler's version, so that it is never stale.
"""

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
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


_PTX_FOLDER = Path(__file__).resolve().parent / "ptx"
#: The file beside the PTX that says which sources it was made from.
_PTX_SOURCES = "SOURCES"


def source_folder() -> Path:
    """Return the folder of the CUDA sources: a checkout's, or the package's own in a wheel.

    Raises:
        KernelError: the folder is neither in the package nor beside it.
    """
    package = Path(__file__).resolve().parent
    for folder in (package.parents[2] / "cuda", package / "cuda"):
        if (folder / "params.h").is_file():
            return folder
    raise KernelError(f"no CUDA sources in {package.parents[2] / 'cuda'} nor in {package / 'cuda'}")


@cache
def _sources_digest() -> bytes:
    digest = hashlib.sha256()
    folder = source_folder()
    for path in sorted(folder.rglob("*")):
        if path.suffix in {".h", ".cuh", ".cu", ".toml"}:
            digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.digest()


def cache_folder() -> Path:
    """Return the folder of compiled kernels."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "chunkcache" / "kernels"


def compiled(instance: Instance) -> bytes:
    """Return the machine code or PTX of an instance: packaged, from the disk or freshly compiled.

    Raises:
        KernelError: there is no PTX and NVRTC is missing, or the compilation failed (with the
            compiler's log).
    """
    if _ptx_is_current():
        return (_PTX_FOLDER / ptx_name(instance)).read_bytes()
    nvrtc = _nvrtc()
    error, major, minor = nvrtc.nvrtcVersion()
    _check(nvrtc, error, "nvrtcVersion")
    key = hashlib.sha256(_sources_digest() + repr((instance, major, minor)).encode()).hexdigest()
    path = cache_folder() / f"{instance.name}-{key[:24]}"
    if path.is_file():
        return path.read_bytes()
    logger.warning(
        "compiling %s for %s with NVRTC %d.%d, once: the result is kept in %s",
        instance.name,
        instance.arch,
        major,
        minor,
        path.parent,
    )
    code = _compile(nvrtc, instance)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        Path(file.name).replace(path)
    except OSError as problem:
        logger.warning("compiled kernels are not kept: %s", problem)
    return code


def compile_ptx(instance: Instance) -> bytes:
    """Compile an instance to PTX, also where machine code is what is usually made of it.

    Raises:
        KernelError: NVRTC is missing, or the compilation failed (with the compiler's log).
    """
    return _compile(_nvrtc(), replace(instance, arch=instance.arch.replace("sm_", "compute_")))


def ptx_name(instance: Instance) -> str:
    """Return the file name of an instance's PTX."""
    return f"{instance.name}.{instance.arch.replace('sm_', 'compute_')}.ptx"


def keep_ptx(files: Mapping[str, bytes]) -> None:
    """Make PTX, by file name, part of the package, in place of what was there."""
    shutil.rmtree(_PTX_FOLDER, ignore_errors=True)
    _PTX_FOLDER.mkdir()
    for name, ptx in files.items():
        (_PTX_FOLDER / name).write_bytes(ptx)
    (_PTX_FOLDER / _PTX_SOURCES).write_text(_sources_digest().hex() + "\n")


@cache
def _ptx_is_current() -> bool:
    made_from = _PTX_FOLDER / _PTX_SOURCES
    return made_from.is_file() and made_from.read_text().strip() == _sources_digest().hex()


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
