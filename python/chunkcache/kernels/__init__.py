"""The CUDA kernels: built with NVRTC, loaded and launched through cuda-python.

`frontend` is what the rest of the package calls, on torch CUDA tensors. Below it: `tpp` (two-phase
attention), `schedule` (the work items of a plan), `table` and `build` (what is compiled, and how),
`driver` (modules, launches and tensor maps).
"""
