"""Which kernels can run here."""

import torch

from chunkcache_testing.devices import NEEDS_CUDA, NEEDS_FP8

__all__ = ["FP8_PATHS", "NEEDS_CUDA", "NEEDS_FP8", "PATHS"]

#: The paths that the device has.
PATHS = ["sm_80"]
if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
    PATHS = ["sm_90", "sm_80"]

#: The paths that read K and V in fp8.
FP8_PATHS = []
if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9):
    FP8_PATHS = ["sm_89"]
