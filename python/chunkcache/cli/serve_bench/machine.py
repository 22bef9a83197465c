"""What a figure belongs to: the machine, the versions, the command and the date."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import chunkcache


def describe(device: str) -> dict[str, Any]:
    """Return the record of this machine, process and moment."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "processor": _processor(),
        "num_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "num_threads": torch.get_num_threads(),
        # Of the minute before.
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "accelerator": torch.cuda.get_device_name() if device == "cuda" else None,
        "system": platform.platform(),
        "versions": {
            "chunkcache": chunkcache.__version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in ("numpy", "torch", "transformers")},
        },
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
