"""Checks of what `chunkcache.reference` is given, so that its steps read like the paper's.

Every check raises `InvalidConfigError` with the argument's name, what was given and what is
allowed.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from chunkcache._arrays import described, int_array
from chunkcache.errors import InvalidConfigError

Array = npt.NDArray[np.float64]

#: Rows, heads, elements and positions at most.
MAX_SIZE = 2**31 - 1


def floats(name: str, array: Any, *dims: str | int) -> Array:
    """Return numbers of a given shape as float64; dimensions that are names are free."""
    allowed = f"numbers [{', '.join(map(str, dims))}]" if dims else "numbers of any shape"
    try:
        found = np.asarray(array)
        numeric = found.dtype.kind in "biuf" or found.dtype.name == "bfloat16"
        converted = found.astype(np.float64) if numeric else None
    except (TypeError, ValueError, RuntimeError, OverflowError):
        converted = None
    if converted is None:
        raise InvalidConfigError(f"{name}: got {described(array)}, allowed is {allowed}")
    sizes = zip(dims, converted.shape, strict=False)
    if dims and (
        converted.ndim != len(dims) or any(d != n for d, n in sizes if isinstance(d, int))
    ):
        raise InvalidConfigError(
            f"{name}: got numbers {list(converted.shape)}, allowed is {allowed}"
        )
    return converted


def queries_keys_values(q: Any, k: Any, v: Any) -> tuple[Array, Array, Array]:
    """Return q, k and v as float64, of shapes that fit each other."""
    queries = floats("q", q, "rows", "num_qo_heads", "head_dim")
    num_qo_heads, head_dim = queries.shape[1:]
    if head_dim == 0:
        raise InvalidConfigError("q: got a head_dim of 0, allowed is 1 or more")
    keys = floats("k", k, "keys", "num_kv_heads", head_dim)
    values = floats("v", v, *keys.shape)
    if keys.shape[1] == 0 or num_qo_heads % keys.shape[1]:
        raise InvalidConfigError(
            f"q: got {num_qo_heads} heads, allowed is a multiple of k's {keys.shape[1]}"
        )
    return queries, keys, values


def positions(name: str, values: Any, count: int | None = None) -> npt.NDArray[np.int64]:
    """Return token positions, integers of one dimension."""
    found = int_array(name, values, 1, MAX_SIZE)
    if count not in (None, found.size):
        raise InvalidConfigError(
            f"{name}: got {found.size} integers, allowed is {count}, one a row"
        )
    return found


def scale(sm_scale: Any, head_dim: int) -> float:
    """Return the factor of the scores, 1/sqrt(head_dim) for None."""
    return float(head_dim**-0.5) if sm_scale is None else _real("sm_scale", sm_scale, -math.inf)


def soft_cap(logits_soft_cap: Any) -> float | None:
    """Return the bound of the scores, None for none or 0."""
    if logits_soft_cap is None:
        return None
    return _real("logits_soft_cap", logits_soft_cap, 0.0) or None


def _real(name: str, value: Any, low: float) -> float:
    numeric = isinstance(value, (int, float, np.integer, np.floating))
    try:
        found = float(value) if numeric and not isinstance(value, bool) else math.nan
    except OverflowError:
        found = math.nan
    if not (math.isfinite(found) and found >= low):
        at_least = " of 0 or more" if low == 0 else ""
        raise InvalidConfigError(
            f"{name}: got {described(value)}, allowed is a finite number{at_least}, or None"
        )
    return found


def visible(mask: Any, rows: int, keys: int) -> npt.NDArray[np.bool_] | None:
    """Return which keys each row sees, bools `[rows, keys]`, or None for all."""
    if mask is None:
        return None
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != (rows, keys):
        given = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, np.ndarray) else None
        raise InvalidConfigError(
            f"visible: got {given or described(mask)}, allowed is a bool array [{rows}, {keys}]"
        )
    return mask
