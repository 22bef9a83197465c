import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import chunkcache
import chunkcache_testing
from chunkcache import attention, reference

TESTS = Path(__file__).resolve().parent

# Refuses every module that is neither Python's own, nor numpy, nor the package.
IMPORT_BESIDE_NUMPY_ALONE = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names | {"numpy", "chunkcache"}:
            raise ModuleNotFoundError(f"{name} is not to be imported", name=name)

sys.meta_path.insert(0, Refuse())
import chunkcache, chunkcache.attention, chunkcache.reference
import numpy as np
cache = chunkcache.ChunkCache(1, 1, 8, capacity=2, chunk_size=16)
seq = cache.insert([1, 2, 3]).seq
rows = np.ones((3, 1, 8), np.float32)
with cache.plan([seq], [0, 3]) as plan:
    cache.write_kv(0, rows, rows, plan)
    assert np.array_equal(cache.attend(0, rows, plan), rows)
    cache.commit(plan)
"""


def test_the_package_needs_numpy_alone() -> None:
    command = [sys.executable, "-W", "error", "-c", IMPORT_BESIDE_NUMPY_ALONE]
    subprocess.run(command, check=True, env={"PYTHONPATH": ":".join(sys.path)}, timeout=60)


def test_the_tests_keep_no_name_from_other_packages() -> None:
    """A folder `kernels` on the path made transformers take it for the package of that name."""
    folders = [Path(entry).resolve() for entry in sys.path if entry]
    ours = [folder for folder in folders if folder.is_relative_to(TESTS)]
    names = {path.stem for folder in ours for path in folder.iterdir()} - {"__pycache__"}
    assert names == {chunkcache_testing.__name__}


def public_objects() -> list:
    found = []
    for module in (chunkcache, attention, reference):
        for name, value in vars(module).items():
            if name.startswith("_") or not callable(value):
                continue
            if not getattr(value, "__module__", "").startswith("chunkcache"):
                continue
            found.append((f"{module.__name__}.{name}", value))
            if inspect.isclass(value):
                found += [
                    (f"{module.__name__}.{name}.{member}", getattr(value, member))
                    for member in vars(value)
                    if not member.startswith("_")
                ]
    return found


@pytest.mark.parametrize(("name", "value"), public_objects())
def test_every_public_name_is_documented(name: str, value: object) -> None:
    assert inspect.getdoc(value), name


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (chunkcache.PrefixTree, "(capacity, chunk_size=64, *, enable_prefix_sharing=True)"),
        (chunkcache.PrefixTree.insert, "(self, /, tokens, cache_salt='')"),
        (chunkcache.PrefixTree.pin, "(self, /, tokens, cache_salt='', ttl=None)"),
    ],
)
def test_signatures_of_the_compiled_half_are_known(function, parameters: str) -> None:
    assert str(inspect.signature(function)) == parameters
