"""The build backend: maturin, with the CUDA sources laid into the package for a wheel.

maturin packs what lies in the package's own folder, while the sources of the kernels have a folder
beside `rust/`: a wheel needs them to compile what it carries no PTX for.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import maturin
from maturin import (
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "cuda"
PACKAGED = ROOT / "python" / "chunkcache" / "kernels" / "cuda"


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Build a wheel with the CUDA sources, and the PTX if `tools/build_ptx.py` has made it."""
    with _sources_in_package():
        name: str = maturin.build_wheel(wheel_directory, config_settings, metadata_directory)
    return name


@contextmanager
def _sources_in_package() -> Iterator[None]:
    shutil.rmtree(PACKAGED, ignore_errors=True)
    shutil.copytree(SOURCES, PACKAGED, ignore=shutil.ignore_patterns("*.md"))
    try:
        yield
    finally:
        shutil.rmtree(PACKAGED)
