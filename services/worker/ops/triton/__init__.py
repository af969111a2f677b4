"""The kernels of the `triton` backend, for NVIDIA and AMD GPUs: the only folder that imports Triton."""
