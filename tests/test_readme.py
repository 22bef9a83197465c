import re
from pathlib import Path

import pytest

from chunkcache_testing.devices import NEEDS_CUDA

README = Path(__file__).resolve().parents[1] / "README.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("example", [c for c in EXAMPLES if "LLM(" not in c and '"cuda"' not in c])
def test_the_examples_of_the_core_run(example: str) -> None:
    exec(compile(example, README.name, "exec"), {})


@NEEDS_CUDA
@pytest.mark.parametrize("example", [code for code in EXAMPLES if '"cuda"' in code])
def test_the_examples_on_a_device_run(example: str) -> None:
    exec(compile(example, README.name, "exec"), {})


def test_there_are_examples_of_the_tree_the_cache_and_the_engine() -> None:
    for name in ("PrefixTree(", "ChunkCache(", "LLM("):
        assert any(name in code for code in EXAMPLES)
