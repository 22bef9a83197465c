"""The results of `benches/gpu.py` as tables in Markdown: `python benches/gpu_table.py FILE`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

#: This project's kernels and the floor; every other contender is a peer.
OURS = ("two-phase", "overlapped", "sm_80", "same pages", "nothing shared")
FLOOR = "read"
TITLES = {
    "trees": "Trees: nodes of each level _ tokens of each node",
    "divergence": "Divergence: sequences with more and more tokens of their own",
    "batch": "Batch: 2048 tokens in common, 64 of each sequence's own",
}


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def best_peer(row: dict[str, Any]) -> tuple[str, float] | None:
    """Return the fastest contender that is not ours, and its microseconds."""
    peers = {n: us[0] for n, us in row["us"].items() if n not in OURS and n != FLOOR}
    return min(peers.items(), key=lambda peer: peer[1]) if peers else None


def _rows_table(rows: list[dict[str, Any]]) -> list[str]:
    header = ["batch, heads q/kv, n_p/n_s", "goal", "read", "ours", "overlapped", "sm_80 path"]
    header += ["FlashInfer decode", "its cascade", "cascade, fa2", "two streams", "cuDNN"]
    header += ["ours / best peer", "ours / read"]
    lines = []
    for row in rows:
        us = {name: times[0] for name, times in row["us"].items()}
        decodes = [us[n] for n in us if n.startswith("flashinfer decode")]
        ours = min(us["two-phase"], us["overlapped"])
        peer = best_peer(row)
        cells = [us[FLOOR], us["two-phase"], us["overlapped"], us["sm_80"]]
        cells += [min(decodes, default=None), us.get("flashinfer cascade")]
        cells += [us.get("flashinfer cascade, fa2"), us.get("flashinfer two streams")]
        cells += [us.get("sdpa, cudnn")]
        ratio = "-" if peer is None else f"{ours / peer[1]:.2f}"
        lines.append(
            [row["name"], f"{row['goal']:g}", *map(_cell, cells), ratio, f"{ours / us[FLOOR]:.2f}"]
        )
    return _table(header, lines)


def _fp8_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        read, ours = (row["us"][name][0] for name in (FLOOR, "two-phase"))
        lines.append([row["name"], _cell(read), _cell(ours), f"{ours / read:.2f}"])
    return _table(["batch, heads q/kv, n_p/n_s", "read", "ours", "ours / read"], lines)


def _sharing_table(rows: list[dict[str, Any]]) -> list[str]:
    header = ["step", "read", "ours", "same pages, read by each", "nothing shared"]
    header += ["FlashInfer decode", "cascade, fa2", "nothing shared / ours"]
    names = [FLOOR, "two-phase", "same pages", "nothing shared"]
    names += ["flashinfer decode", "flashinfer cascade, fa2"]
    lines = []
    for row in rows:
        us = {name: times[0] for name, times in row["us"].items()}
        apart = us.get("nothing shared")
        gain = "-" if apart is None else f"{apart / us['two-phase']:.1f}"
        lines.append([row["name"], *(_cell(us.get(name)) for name in names), gain])
    return _table(header, lines)


def tables(record: dict[str, Any]) -> str:
    """Return the Markdown of a record that `benches/gpu.py` wrote."""
    facts = ("device", "driver", "torch", "cuda", "cudnn", "flashinfer")
    said = ", ".join(f"{fact} {record[fact]}" for fact in facts)
    lines = [f"# {record['device']}", "", f"{said}. `{record['command']}`. Microseconds.", ""]
    if record.get("rows"):
        lines += ["## One common prompt", "", *_rows_table(record["rows"]), ""]
    if record.get("fp8"):
        lines += ["## K and V in fp8 (e4m3)", "", *_fp8_table(record["fp8"]), ""]
    for section, title in TITLES.items():
        if record.get(section):
            lines += [f"## {title}", "", *_sharing_table(record[section]), ""]
    if record.get("plan"):
        plan = [[name, _cell(us)] for name, us in record["plan"].items()]
        lines += ["## Host time of a plan of 256 sequences", "", *_table(["step", "us"], plan), ""]
    slower = record["slower than without sharing"]
    lines += ["Slower than without sharing: " + ("; ".join(slower) or "none") + "."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(tables(json.loads(Path(sys.argv[1]).read_text())))
