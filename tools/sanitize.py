"""Run compute-sanitizer over a small grid of all CUDA kernels: `python tools/sanitize.py`.

The grid (`sanitizer_grid` among the tests' own modules) runs once for each tool and checks its own
results.
Every allocation in it is one of the driver's: a caching allocator would hide what lies past an end.
For racecheck, attention is compiled with two differences that it needs to follow the order of
things (`CHUNKCACHE_RACECHECK` in `cuda/common/ptx.cuh`). Exits with 1 if a tool reports anything.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

#: The kernels whose use of shared memory is looked at; torch's beside them are not ours to mend.
OURS = "--kernel-name=regex=tpp_|write_kv|copy_chunk|merge_state|apply_tables|decode_"
#: The options of each tool.
TOOLS = {
    # Calls that fail raise in Python; cuda-python asks for functions that a driver may not have.
    "memcheck": ["--report-api-errors=no"],
    "racecheck": ["--racecheck-report=analysis", "--show-backtrace=no", OURS],
    "initcheck": [],
    "synccheck": [OURS],
}

_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: (\d+) hazards? displayed")


def reports(log: str) -> int | None:
    """Return how many reports the summary of a tool counts, None if it has none."""
    found = _SUMMARY.findall(log)
    return sum(int(number) for numbers in found for number in numbers if number) if found else None


def run(tool: str, grid: list[str], logs: Path | None, timeout: float) -> bool:
    """Run the grid under one tool, print its summary and return whether it is clean."""
    command = ["compute-sanitizer", f"--tool={tool}", *TOOLS[tool], "--print-limit=1000"]
    command += [sys.executable, "-m", "chunkcache_testing.kernels.sanitizer_grid", *grid]
    if tool == "racecheck":
        command.append("--racecheck")
    sources = [str(ROOT / "python"), str(ROOT / "tests" / "lib")]
    paths = [*sources, os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYTHONUNBUFFERED": "1",
    }
    begin = time.monotonic()
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            log, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            # The tool's own child, too.
            os.killpg(process.pid, signal.SIGKILL)
            log, _ = process.communicate()
    seconds = time.monotonic() - begin
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
        (logs / f"{tool}.log").write_text(log)
    count = reports(log)
    code = process.returncode
    is_clean = count == 0 and code == 0
    said = "no summary" if count is None else f"{count} reports"
    sys.stdout.write(f"{tool:10} {said}, exit code {code}, {seconds:.0f} s\n")
    if not is_clean:
        sys.stdout.write("".join(f"  {line}\n" for line in log.splitlines()[-60:]))
    sys.stdout.flush()
    return is_clean


def main() -> int:
    """Run the tools that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tools", nargs="*", default=list(TOOLS), metavar="tool")
    parser.add_argument("--grid", nargs="*", default=[], help="parts of the grid, by default all")
    parser.add_argument("--logs", type=Path, help="a folder for the whole logs")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each tool")
    arguments = parser.parse_args()
    unknown = set(arguments.tools) - set(TOOLS)
    if unknown:
        parser.error(f"tool: got {', '.join(sorted(unknown))}, allowed are {', '.join(TOOLS)}")
    if shutil.which("compute-sanitizer") is None:
        sys.exit("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
    clean = [
        run(tool, arguments.grid, arguments.logs, arguments.timeout) for tool in arguments.tools
    ]
    return 0 if all(clean) else 1


if __name__ == "__main__":
    sys.exit(main())
