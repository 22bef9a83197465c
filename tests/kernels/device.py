"""Whether the kernels can run here."""

import importlib.util

import pytest
import torch

NEEDS_CUDA = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("cuda") is None,
    reason="needs a CUDA device and chunkcache[cuda]",
)

#: The paths that the device has.
PATHS = ["sm_80"]
if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
    PATHS = ["sm_90", "sm_80"]
