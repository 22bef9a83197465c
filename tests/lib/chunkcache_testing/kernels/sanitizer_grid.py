"""A small grid of all kernels, for compute-sanitizer (`tools/sanitize.py`): each result is checked.

Inputs come from the host, so that few kernels of torch run beside those that are looked at. With
`--racecheck` attention is compiled in a form that racecheck follows (`cuda/common/ptx.cuh`).
"""

import argparse
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
import torch

from chunkcache import attention, reference
from chunkcache.kernels import build, frontend, table, tpp
from chunkcache.kernels.decode import DecodeKernels, Rotation, compiled_rows
from chunkcache.kernels.decode import Pages as DecodePages
from chunkcache_testing.kernels.device import FP8_PATHS, PATHS
from chunkcache_testing.kernels.serving import Serving

FP8 = torch.float8_e4m3fn
NAMES = {torch.float16: "F16", torch.bfloat16: "BF16"}
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
#: Of K and V in fp8.
SCALE = 0.5


@dataclass(frozen=True)
class Pages:
    """A step over pages: sequences of `tails` own tokens behind `shared` common ones."""

    shared: int
    tails: tuple[int, ...]
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int = 128
    page_size: int = 64
    dtype: torch.dtype = torch.float16
    is_fp8: bool = False
    qo_len: int = 1
    window_left: int = -1
    logits_soft_cap: float = 0.0


STEPS = (
    # Few rows: shared and private items, splits, merges in the item that ends a row.
    Pages(64, (1, 33, 70), 4, 2, head_dim=64, page_size=16),
    # 80 rows of a K/V head: warpgroups multiply; rows that end in a shared segment are merged last.
    Pages(512, (0, 0, 65, 65, 65, 65, 65, 0, 65, 65), 16, 2),
    Pages(256, (0,) * 16, 8, 1),
    # Prefill of a suffix over a cached prefix, masked row by row.
    Pages(128, (70, 100), 4, 2, qo_len=70),
    Pages(96, (33, 5, 40), 6, 2, page_size=32, qo_len=5, window_left=40, logits_soft_cap=5.0),
    Pages(64, (20, 9), 4, 4, head_dim=96, page_size=16, dtype=torch.bfloat16, window_left=30),
    # Four consumer warps, queries in shared memory.
    Pages(64, (20, 9), 4, 2, head_dim=256, page_size=16),
    Pages(96, (33, 5, 40), 8, 2, page_size=32, qo_len=5, is_fp8=True, window_left=60),
)


def attend(step: Pages, path: str) -> None:
    """One launch, against the CPU kernels; K/V that no query sees is NaN."""
    rng = np.random.default_rng(3)
    size = step.page_size
    shared, own = step.shared // size, -(-max(step.tails) // size)
    table = np.zeros((len(step.tails), shared + own), dtype=np.int64)
    ids = rng.permutation(shared + len(step.tails) * own)
    table[:, :shared] = ids[:shared]
    table[:, shared:] = ids[shared:].reshape(len(step.tails), own)
    lens = [step.shared + tail for tail in step.tails]
    kv = torch.full((len(ids), 2, size, step.num_kv_heads, step.head_dim), torch.nan)
    for row, length in zip(table, lens, strict=True):
        for place, page in enumerate(row[: -(-length // size)]):
            here = min(length - place * size, size)
            shape = (2, here, step.num_kv_heads, step.head_dim)
            kv[page, :, :here] = torch.from_numpy(rng.standard_normal(shape))
    kv = kv.to(FP8 if step.is_fp8 else step.dtype)
    scale = SCALE if step.is_fp8 else None
    rows = len(lens) * step.qo_len
    shape = (rows, step.num_qo_heads, step.head_dim)
    q = torch.from_numpy(rng.standard_normal(shape)).to(step.dtype)
    indptr = np.arange(len(lens) + 1) * step.qo_len
    plan = attention.plan_from_block_tables(table, lens, size, indptr)
    options = frontend.Options(None, step.logits_soft_cap, step.window_left, True)

    kernel = tpp.TppAttention(
        torch.cuda.current_device(),
        NAMES[step.dtype],
        "E4M3" if step.is_fp8 else NAMES[step.dtype],
        step.num_qo_heads,
        step.num_kv_heads,
        step.head_dim,
        path,
    )
    pages = frontend.paged_kv(kv.cuda(), None, "NHD", kernel.device, scale, scale)
    poisoned = torch.full_like(q, torch.nan).cuda()
    call = frontend.prepare(rows, q.cuda(), pages, options, poisoned, None)
    stream = torch.cuda.current_stream().cuda_stream
    tables = frontend.device_tables(plan, kernel, stream)
    for _ in range(2):
        frontend.launch(kernel, tables, pages, call, options)
    expected = attention.run(
        plan,
        q.float(),
        kv.float() * (scale or 1.0),
        logits_soft_cap=step.logits_soft_cap,
        window_left=step.window_left,
    )
    found = call.out.cpu().float()
    error = reference.error(found.numpy(), expected.numpy())
    if not error <= TOLERANCE[step.dtype]:
        raise AssertionError(f"{step} on {path}: error {error}")


def steps() -> None:
    """Two-phase attention on all paths."""
    for step in STEPS:
        for path in FP8_PATHS if step.is_fp8 else PATHS:
            attend(step, path)


def follows() -> None:
    """Steps over others' pages whose tables follow, while sequences grow into new pages."""
    rng = np.random.default_rng(9)
    table = np.array([[4, 1, 7, 2], [4, 1, 3, 8], [4, 1, 9, 5]])
    kv = torch.from_numpy(rng.standard_normal((10, 2, 16, 2, 64))).half()
    on_device = kv.cuda()
    planner = attention.BlockTablePlanner(16)
    for grown in range(0, 20, 4):
        lens = np.array([33, 40, 38]) + grown
        q = torch.from_numpy(rng.standard_normal((3, 4, 64))).half()
        out = attention.run(planner.plan(table, lens), q.cuda(), on_device, None)
        plan = attention.plan_from_block_tables(table, lens, 16)
        _check("followed tables", out, attention.run(plan, q.float(), kv.float()))


def writes() -> None:
    """New K/V into slots, converted from each type to each."""
    rng = np.random.default_rng(4)
    slots = torch.tensor([17, -1, 63, 0, 5])
    for pages_dtype in (*NAMES, *([FP8] if FP8_PATHS else [])):
        scale, near = (SCALE, 0.07) if pages_dtype == FP8 else (None, 0.0)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            k, v = (torch.from_numpy(rng.standard_normal((5, 3, 80))).to(dtype) for _ in range(2))
            pages = torch.full((4, 2, 16, 3, 80), torch.nan)
            on_device = pages.to(pages_dtype).cuda()
            paged = frontend.paged_kv(on_device, None, "NHD", on_device.device.index, scale, scale)
            frontend.write_kv(k.cuda(), v.cuda(), slots.cuda(), paged)
            for row, slot in enumerate(slots.tolist()):
                if slot >= 0:
                    pages[slot // 16, 0, slot % 16] = k[row].to(pages_dtype if not scale else dtype)
                    pages[slot // 16, 1, slot % 16] = v[row].to(pages_dtype if not scale else dtype)
            found = on_device.cpu().float() * (scale or 1.0)
            if not torch.allclose(found, pages, rtol=near, atol=near / 50, equal_nan=True):
                raise AssertionError(f"write_kv from {dtype} to {pages_dtype}")


def copies() -> None:
    """Heads of chunks into other chunks."""
    pages = torch.from_numpy(np.random.default_rng(5).standard_normal((3, 5, 2, 2, 16, 64))).half()
    on_device = pages.cuda()
    frontend.Arena(on_device).copy_chunk_heads([(1, 4, 7), (2, 0, 16)])
    pages[:, 4, :, :, :7] = pages[:, 1, :, :, :7]
    pages[:, 0] = pages[:, 2]
    if not torch.equal(on_device.cpu(), pages):
        raise AssertionError("copy_chunk")


def merges() -> None:
    """States of each type, empty ones among them."""
    rng = np.random.default_rng(6)
    for dtype in (torch.float32, *NAMES):
        o_a, o_b = (torch.from_numpy(rng.standard_normal((9, 4, 72))).to(dtype) for _ in range(2))
        lse_a, lse_b = (torch.from_numpy(rng.standard_normal((9, 4))).float() for _ in range(2))
        lse_a[0] = lse_b[1] = -torch.inf
        o, lse = attention.merge_state(o_a.cuda(), lse_a.cuda(), o_b.cuda(), lse_b.cuda())
        ref, ref_lse = attention.merge_state(o_a.float(), lse_a, o_b.float(), lse_b)
        if not torch.allclose(lse.cpu(), ref_lse, atol=1e-4):
            raise AssertionError(f"merge_state, lse of {dtype}")
        if not torch.allclose(o.cpu().float(), ref, atol=3e-2):
            raise AssertionError(f"merge_state of {dtype}")


def replays() -> None:
    """A captured step while sequences grow, fill chunks, join, fork, diverge and leave."""
    serving = Serving(rows=5)
    prompt = list(range(40))
    seqs = [serving.insert([*prompt, i]) for i in range(2)]
    for token in range(1, 9):
        serving.decode(seqs)
        if token == 2:
            seqs.insert(0, serving.insert([*prompt[:35], 99, 7]))
        if token == 4:
            seqs.append(serving.fork(seqs[1]))
        if token == 6:
            serving.remove(seqs.pop(2))
        known = [serving.cache.sequence(seq) for seq in seqs]
        behind = [info.num_known_tokens - info.num_computed_tokens for info in known]
        serving.append([seq for seq, left in zip(seqs, behind, strict=True) if left == 0], token)


def decode() -> None:
    """The kernels of a decode step beside the attention, where the device has them."""
    if "sm_90" not in PATHS:
        return
    rng = np.random.default_rng(7)
    for rows, width, columns in ((3, 384, 72), (40, 1024, 1024)):
        x, hidden = (_normal(rng, rows, n) for n in (columns, width))
        matrices = [_normal(rng, width, columns) for _ in range(2)]
        weight = _normal(rng, width)
        gate, up = (x.float() @ matrix.float().T for matrix in matrices)
        kernels, on_device, padded = _product_inputs(x, matrices)
        out = torch.full((rows, width), torch.nan).half().cuda()
        kernels.gate(kernels.product(on_device, padded), out)
        _check("decode_gate", out, torch.nn.functional.silu(gate) * up)
        sums = hidden.cuda()
        parts = kernels.product(on_device[:1], padded)
        kernels.add_and_normalize(parts, sums, weight.cuda(), 1e-5, out)
        _check("decode_product", sums, hidden.float() + gate)
        normed = torch.nn.functional.rms_norm(sums.cpu().float(), (width,), weight.float(), 1e-5)
        _check("decode_normalize", out, normed)


def rotate() -> None:
    """The kernel that turns and writes heads, where the device has it."""
    if "sm_90" not in PATHS:
        return
    rng = np.random.default_rng(8)
    rows, heads, head_dim = 5, (4, 2, 2), 64
    x = _normal(rng, rows, 128)
    matrices = [_normal(rng, n * head_dim, 128) for n in heads]
    kernels, on_device, padded = _product_inputs(x, matrices)
    angles = torch.from_numpy(rng.standard_normal((50, head_dim // 2))).float()
    rotation = Rotation(angles.cos().cuda(), angles.sin().cuda())
    positions, slots = torch.tensor([7, 0, 49, 3, 4]), torch.tensor([-1, 33, 5, 16, 47])
    pages = torch.zeros(3, 2, heads[1], 16, head_dim).half().cuda()
    q = torch.full((rows, heads[0], head_dim), torch.nan).half().cuda()
    kernels.rotate(
        kernels.product(on_device, padded),
        (None, None, None),
        None,
        rotation,
        positions.cuda(),
        slots.cuda(),
        q,
        DecodePages(pages[:, 0], pages[:, 1]),
    )
    expected = []
    for index, matrix in enumerate(matrices):
        y = (x.float() @ matrix.float().T).unflatten(1, (heads[index], head_dim))
        cosine, sine = angles.cos()[positions][:, None], angles.sin()[positions][:, None]
        low, high = y.chunk(2, dim=-1)
        turned = torch.cat((low * cosine - high * sine, high * cosine + low * sine), dim=-1)
        expected.append(turned if index < 2 else y)
    _check("decode_rotate, q", q, expected[0])
    written = slots[1:]
    for side, name in enumerate("kv"):
        found = pages.cpu()[written // 16, side, :, written % 16]
        _check(f"decode_rotate, {name}", found, expected[1 + side][1:])


def _normal(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape) / shape[-1] ** 0.5).half()


def _product_inputs(
    x: torch.Tensor, matrices: list[torch.Tensor]
) -> tuple[DecodeKernels, list[torch.Tensor], torch.Tensor]:
    rows, columns = x.shape
    padded = torch.zeros(compiled_rows(rows), columns).half()
    padded[:rows] = x
    on_device = [matrix.cuda() for matrix in matrices]
    size = DecodeKernels.num_part_values(on_device, rows, torch.cuda.current_device())
    return DecodeKernels(rows, torch.full((size,), torch.nan).cuda()), on_device, padded.cuda()


def _check(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    error = float((found.cpu().float() - expected).abs().max() / expected.abs().max())
    if not error <= TOLERANCE[torch.float16]:
        raise AssertionError(f"{name}: error {error}")


GRID: dict[str, Callable[[], None]] = {
    "writes": writes,
    "copies": copies,
    "merges": merges,
    "steps": steps,
    "follows": follows,
    "replays": replays,
    "decode": decode,
    "rotate": rotate,
}


def followed() -> AbstractContextManager[object]:
    """Let attention be compiled in the form that racecheck follows."""

    def find(name: str, arch: str) -> build.Instance:
        instance = table.find(name, arch)
        defines = {**dict(instance.defines), "CHUNKCACHE_RACECHECK": "1"}
        return replace(instance, defines=tuple(sorted(defines.items())))

    stack = ExitStack()
    stack.enter_context(mock.patch.object(tpp, "find", find))
    stack.enter_context(mock.patch.object(build, "_ptx_is_current", return_value=False))
    return stack


def main() -> None:
    """Run the parts that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(GRID)}; all by default")
    parser.add_argument("--racecheck", action="store_true")
    arguments = parser.parse_args()
    with followed() if arguments.racecheck else nullcontext():
        for name in arguments.parts or GRID:
            GRID[name]()
            torch.cuda.synchronize()
            sys.stdout.write(f"{name}: right\n")


if __name__ == "__main__":
    main()
