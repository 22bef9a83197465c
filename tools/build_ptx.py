"""Compile every kernel to the PTX that a wheel carries, and fail on register spills.

    PYTHONPATH=python python tools/build_ptx.py

Runs in an environment of its own (`make ptx`) with the oldest CUDA toolkit that is supported,
because PTX runs on drivers of its toolkit's release and newer. ptxas then translates each file for
the architecture that it is meant for; any spill that it reports fails the build. No GPU is needed.
"""

import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import files
from pathlib import Path
from typing import NamedTuple

from chunkcache.kernels import build, table

_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


class Compiled(NamedTuple):
    """What became of one kernel."""

    file: str
    ptx: bytes
    registers: int
    spilled_bytes: int


def ptxas() -> Path:
    """Return the assembler of the installed toolkit."""
    for file in files("nvidia-cuda-nvcc-cu12") or []:
        if file.name == "ptxas":
            return Path(str(file.locate()))
    sys.exit("no ptxas: pip install nvidia-cuda-nvcc-cu12")


def compile_one(instance: build.Instance) -> Compiled:
    """Compile one kernel to PTX and assemble that."""
    ptx = build.compile_ptx(instance)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_bytes(ptx)
        arch = instance.arch.replace("compute_", "sm_")
        command = [
            ptxas(),
            "--verbose",
            f"--gpu-name={arch}",
            "--output-file",
            "kernel.cubin",
            source,
        ]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{instance.name}: {done.stderr}")
    spills = _SPILLS.search(done.stderr)
    registers = _REGISTERS.search(done.stderr)
    if spills is None or registers is None:
        sys.exit(f"{instance.name}: ptxas says nothing about registers: {done.stderr}")
    spilled = int(spills[1]) + int(spills[2])
    return Compiled(build.ptx_name(instance), ptx, int(registers[1]), spilled)


def main() -> None:
    """Compile all instances side by side, and keep the PTX if nothing spills."""
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        results = list(pool.map(compile_one, table.instances().values()))
    spilling = [f"{r.file}: {r.spilled_bytes} bytes" for r in results if r.spilled_bytes]
    if spilling:
        sys.exit("registers spill to memory in\n" + "\n".join(spilling))
    build.keep_ptx({result.file: result.ptx for result in results})
    widest = max(results, key=lambda r: r.registers)
    size = sum(len(r.ptx) for r in results) / 2**20
    sys.stdout.write(
        f"{len(results)} kernels, {size:.1f} MiB of PTX, no spills, at most {widest.registers}"
        f" registers ({widest.file})\n"
    )


if __name__ == "__main__":
    main()
