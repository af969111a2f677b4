"""The `native` backend: C++ kernels for x86-64, built by the machine's own compiler."""
