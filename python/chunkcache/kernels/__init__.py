"""The CUDA kernels: built with NVRTC, loaded and launched through cuda-python.

`frontend` is what the rest of the package calls, on torch CUDA tensors; `storage` is a `ChunkCache`
on a device, with `image` (its tables there), `staging` (how they get there) and `graphs` (captured
steps). Below them: `tpp` (two-phase attention), `work` (the work items of a plan), `table` and
`build` (what is compiled, and how), `driver` (modules, launches and tensor maps).
"""
