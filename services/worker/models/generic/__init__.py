"""Models that run transformers' own modelling code, with attention, products and KV cache of ours.

The only folder of the worker that imports transformers, and only when such a model is loaded.
"""
