"""Which kernels can run here."""

import torch

from support.devices import NEEDS_CUDA, NEEDS_FP8

__all__ = ["NEEDS_CUDA", "NEEDS_FP8", "PATHS"]

#: The paths that the device has.
PATHS = ["sm_80"]
if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
    PATHS = ["sm_90", "sm_80"]
