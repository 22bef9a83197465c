"""The entry points that exist: `cuda/instances.toml`, expanded."""

import itertools
import tomllib
from functools import cache
from typing import Any

from chunkcache.errors import KernelError
from chunkcache.kernels.build import Instance, source_folder

_MACROS = {
    "type": "CHUNKCACHE_TYPE",
    "kv": "CHUNKCACHE_KV",
    "head_dim": "CHUNKCACHE_HEAD_DIM",
    "from": "CHUNKCACHE_FROM",
}


@cache
def instances() -> dict[tuple[str, str], Instance]:
    """Return every instance by name and architecture."""
    table = tomllib.loads((source_folder() / "instances.toml").read_text())
    return {
        (instance.name, instance.arch): instance
        for kernel in table["kernel"]
        for instance in _expand(kernel)
    }


def find(name: str, arch: str = "compute_80") -> Instance:
    """Return one instance.

    Raises:
        KernelError: it is not in the table.
    """
    try:
        return instances()[name, arch]
    except KeyError:
        raise KernelError(f"no kernel {name} for {arch} in cuda/instances.toml") from None


def _expand(kernel: dict[str, Any]) -> list[Instance]:
    axes = {axis: values for axis, values in kernel.items() if axis in _MACROS}
    found = []
    for arch in kernel["arch"]:
        for values in itertools.product(*axes.values()):
            chosen = dict(zip(axes, values, strict=True))
            name = kernel["name"].format(**chosen).lower()
            defines = {_MACROS[axis]: str(value) for axis, value in chosen.items()}
            defines["CHUNKCACHE_NAME"] = name
            if arch == "sm_90a":
                defines["CHUNKCACHE_TMA"] = "1"
            found.append(Instance(kernel["source"], name, arch, tuple(sorted(defines.items()))))
    return found
