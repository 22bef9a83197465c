"""The constants of a device that work items are cut by: shipped, or measured by `tune`."""

import json
import logging
import os
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path

from chunkcache.errors import KernelError
from chunkcache.kernels.driver import check, driver, limits
from chunkcache.kernels.work import DeviceCosts

logger = logging.getLogger(__name__)

#: The devices that `DeviceCosts`' defaults were measured on, as the driver names them.
SHIPPED = ("NVIDIA H200",)


def device_name(device: int) -> str:
    """Return a device's name: "NVIDIA H200"."""
    name = check(driver().cuDeviceGetName(256, device), "cuDeviceGetName")
    return bytes(name).split(b"\0")[0].decode()


def costs_file(name: str) -> Path:
    """Return where the measured constants of devices of that name are kept."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    kept = "".join(c if c.isalnum() else "-" for c in name).lower()
    return Path(root) / "chunkcache" / "costs" / f"{kept}.json"


def keep_costs(name: str, costs: DeviceCosts) -> Path:
    """Keep measured constants for later processes, and return where."""
    path = costs_file(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(costs), indent=1) + "\n")
    costs_of.cache_clear()
    return path


def read_costs(name: str, num_blocks: int) -> DeviceCosts | None:
    """Return the constants that were measured for devices of that name, if they were.

    Raises:
        KernelError: the file of constants is not one that `keep_costs` wrote.
    """
    path = costs_file(name)
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text())
        known = {field.name for field in fields(DeviceCosts)}
        if set(found) != known or not all(x > 0 for x in found.values()):
            raise ValueError(f"allowed are positive numbers {', '.join(sorted(known))}")
    except (OSError, TypeError, ValueError, AttributeError) as problem:
        raise KernelError(f"{path}: {problem}; delete it, or run `chunkcache tune`") from problem
    return DeviceCosts(**{**found, "num_blocks": num_blocks})


@cache
def costs_of(device: int) -> DeviceCosts:
    """Return a device's constants: measured by `chunkcache tune`, else those of an H200.

    Raises:
        KernelError: the file of measured constants is broken.
    """
    num_blocks = limits(device).num_multiprocessors
    name = device_name(device)
    measured = read_costs(name, num_blocks)
    if measured is not None:
        return measured
    if name not in SHIPPED:
        logger.warning(
            "no constants for %s: those of an H200 are taken; `chunkcache tune` measures them", name
        )
    return DeviceCosts(num_blocks=num_blocks)
