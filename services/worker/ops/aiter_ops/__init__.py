"""The `aiter` backend, for AMD GPUs: the only folder that imports AITER.

All but AITER's mandatory arguments go by keyword, as their order changes between its versions.
"""
