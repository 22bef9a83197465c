"""RMS norms as one kernel each, while a decode step is recorded.

transformers writes an RMS norm as half a dozen operations, each a kernel of its own; torch has one
for all of it. For few rows a kernel costs what it takes to launch, so that the norms would take as
long as the attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_EPSILONS = ("variance_epsilon", "eps", "epsilon")
#: Largest difference, over the largest value, from what the module itself computes: that of one
#: more or less rounding to bfloat16.
_TOLERANCE = 2**-7


@contextmanager
def fused_norms(model: Any) -> Iterator[int]:
    """Compute the RMS norms of ``model`` by torch's own kernel inside the context.

    Yields:
        How many modules there are of which torch's kernel gives what they compute.
    """
    fused = [module for module in model.modules() if _is_rms_norm(module)]
    for module in fused:
        module.forward = _Fused(module)
    try:
        yield len(fused)
    finally:
        for module in fused:
            del module.forward


class _Fused:
    def __init__(self, module: Any) -> None:
        self._weight = module.weight
        self._epsilon = _epsilon(module)

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(
            hidden_states, self._weight.shape, self._weight, self._epsilon
        )


def _epsilon(module: Any) -> float | None:
    found = (getattr(module, name, None) for name in _EPSILONS)
    return next((value for value in found if isinstance(value, float)), None)


def _is_rms_norm(module: Any) -> bool:
    """Tell by its parameters, and by what it computes: some models add 1 to the weight."""
    if "RMSNorm" not in type(module).__name__ or "forward" in vars(module):
        return False
    weight = getattr(module, "weight", None)
    parameters = list(module.parameters())
    if weight is None or weight.ndim != 1 or len(parameters) != 1 or _epsilon(module) is None:
        return False
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(4, len(weight), generator=generator).to(weight)
    with torch.inference_mode():
        try:
            expected = module(sample).float()
        except (RuntimeError, TypeError, ValueError):
            return False
        found = _Fused(module)(sample).float()
    return bool((found - expected).abs().max() <= _TOLERANCE * expected.abs().max())
