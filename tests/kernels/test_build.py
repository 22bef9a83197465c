"""The table of instances, and that all of it compiles without spills."""

import subprocess
import sys

import pytest

from chunkcache.errors import KernelError
from chunkcache.kernels import build
from chunkcache.kernels.build import compiled, keep_ptx, ptx_name, source_folder
from chunkcache.kernels.table import find, instances
from chunkcache.kernels.tpp import ELEMENTS, HEAD_DIMS


def test_the_table_is_as_large_as_it_says():
    table = (source_folder() / "instances.toml").read_text()
    assert f"\n# {len(instances())} in all, of at most 60" in table
    assert len(instances()) <= 60


def test_every_source_exists():
    assert {(source_folder() / i.source).is_file() for i in instances().values()} == {True}


def test_every_head_dim_has_both_paths():
    for element in ELEMENTS:
        for head_dim in HEAD_DIMS:
            for arch in ("sm_90a", "compute_80"):
                assert find(f"tpp_{element}_{head_dim}".lower(), arch).arch == arch


def test_every_head_dim_is_there_over_fp8():
    for head_dim in HEAD_DIMS:
        defines = find(f"tpp_e4m3_{head_dim}", "compute_89").defines
        assert ("CHUNKCACHE_KV", "E4M3") in defines


def test_an_unknown_kernel_is_named():
    with pytest.raises(KernelError, match="no kernel tpp_f16_72 for compute_80"):
        find("tpp_f16_72")


def test_attention_loads_neither_torch_nor_cuda():
    code = "import chunkcache.attention, sys; print('torch' in sys.modules, 'cuda' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["False", "False"]


@pytest.fixture
def ptx_folder(tmp_path, monkeypatch):
    """A package without PTX."""
    monkeypatch.setattr(build, "_PTX_FOLDER", tmp_path / "ptx")
    build._ptx_is_current.cache_clear()
    yield tmp_path / "ptx"
    build._ptx_is_current.cache_clear()


def without_compiler():
    raise KernelError("no compiler")


@pytest.mark.usefixtures("ptx_folder")
def test_small_kernels_compile(tmp_path, monkeypatch, caplog):
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC: pip install 'chunkcache[cuda]'")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = compiled(find("merge_state_f16"))
    assert b"merge_state_f16" in code
    folder = tmp_path / "chunkcache" / "kernels"
    assert [path.read_bytes() for path in folder.iterdir()] == [code]
    assert f"the result is kept in {folder}" in caplog.text


def test_packaged_ptx_needs_no_compiler(ptx_folder, monkeypatch):
    monkeypatch.setattr(build, "_nvrtc", without_compiler)
    instance = find("tpp_f16_128", "sm_90a")
    keep_ptx({ptx_name(instance): b".version 8.4"})
    assert compiled(instance) == b".version 8.4"
    assert (ptx_folder / "tpp_f16_128.compute_90a.ptx").is_file()


def test_ptx_of_other_sources_is_not_used(ptx_folder, monkeypatch):
    monkeypatch.setattr(build, "_nvrtc", without_compiler)
    instance = find("copy_chunk")
    keep_ptx({ptx_name(instance): b".version 8.4"})
    (ptx_folder / "SOURCES").write_text("0123\n")
    with pytest.raises(KernelError, match="no compiler"):
        compiled(instance)


@pytest.mark.usefixtures("ptx_folder")
def test_a_missing_compiler_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(KernelError, match=r"chunkcache\[cuda\]"):
        compiled(find("copy_chunk"))
