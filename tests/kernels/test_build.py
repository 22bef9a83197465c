"""The table of instances, and that all of it compiles without spills."""

import subprocess
import sys

import pytest

from chunkcache.errors import KernelError
from chunkcache.kernels.build import compiled, source_folder
from chunkcache.kernels.table import find, instances
from chunkcache.kernels.tpp import ELEMENTS, HEAD_DIMS


def test_the_table_is_small():
    assert len(instances()) <= 60


def test_every_source_exists():
    assert {(source_folder() / i.source).is_file() for i in instances().values()} == {True}


def test_every_head_dim_has_both_paths():
    for element in ELEMENTS:
        for head_dim in HEAD_DIMS:
            for arch in ("sm_90a", "compute_80"):
                assert find(f"tpp_{element}_{head_dim}".lower(), arch).arch == arch


def test_an_unknown_kernel_is_named():
    with pytest.raises(KernelError, match="no kernel tpp_f16_72 for compute_80"):
        find("tpp_f16_72")


def test_attention_loads_neither_torch_nor_cuda():
    code = "import chunkcache.attention, sys; print('torch' in sys.modules, 'cuda' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["False", "False"]


def test_small_kernels_compile(tmp_path, monkeypatch):
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC: pip install 'chunkcache[cuda]'")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = compiled(find("merge_state_f16"))
    assert b"merge_state_f16" in code
    kept = list((tmp_path / "chunkcache" / "kernels").iterdir())
    assert [path.read_bytes() for path in kept] == [code]
