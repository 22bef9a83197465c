"""The table of instances, and that all of it compiles without spills."""

import ctypes
import subprocess
import sys
from types import SimpleNamespace

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


MADE = b".version 8.4 .target sm_80"
LOG = b"line 3: what is that"


def nvrtc(*, status: int = 0, compilations: list[list[bytes]] | None = None) -> SimpleNamespace:
    """NVRTC as cuda.bindings has it, which makes the same of every source, or refuses it."""

    def compile_program(program, num_options, options):
        if compilations is not None:
            compilations.append(options)
        return (status,)

    def get_ptx(program, buffer):
        # The bindings, too, write into what looks immutable.
        ctypes.memmove(buffer, MADE, len(MADE))
        return (0,)

    return SimpleNamespace(
        nvrtcResult=SimpleNamespace(NVRTC_SUCCESS=0),
        nvrtcVersion=lambda: (0, 12, 4),
        nvrtcCreateProgram=lambda *source: (0, "program"),
        nvrtcCompileProgram=compile_program,
        nvrtcGetProgramLogSize=lambda program: (0, len(LOG)),
        nvrtcGetProgramLog=lambda program, buffer: ctypes.memmove(buffer, LOG, len(LOG)),
        nvrtcGetPTXSize=lambda program: (0, len(MADE)),
        nvrtcGetPTX=get_ptx,
        nvrtcDestroyProgram=lambda program: (0,),
    )


@pytest.mark.usefixtures("ptx_folder")
def test_what_is_compiled_is_kept(tmp_path, monkeypatch, caplog):
    compilations: list[list[bytes]] = []
    monkeypatch.setattr(build, "_nvrtc", lambda: nvrtc(compilations=compilations))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    instance = find("merge_state_f16")
    assert compiled(instance) == MADE
    assert b"--gpu-architecture=compute_80" in compilations[0]
    folder = tmp_path / "chunkcache" / "kernels"
    assert [path.read_bytes() for path in folder.iterdir()] == [MADE]
    assert f"the result is kept in {folder}" in caplog.text
    assert compiled(instance) == MADE
    assert len(compilations) == 1


@pytest.mark.usefixtures("ptx_folder")
def test_what_does_not_compile_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_nvrtc", lambda: nvrtc(status=6))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(KernelError, match="merge_state_f16 does not compile: line 3"):
        compiled(find("merge_state_f16"))
    assert not (tmp_path / "chunkcache").exists()


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
