"""Keys of a `quantization_config` that its reader never asks for: why each changes nothing in the values of weights.

What is read is recorded (`RecordedConfig`), so that no list has it. All other keys are named in the log.
"""

from __future__ import annotations

from collections.abc import Mapping

_ACTIVATIONS = "activations are not quantised as a checkpoint says"
_CACHE = "scales of a KV cache are read where that is in FP8, by their names"
_TENSORS = "the stored tensors show it"
_HOW = "how values were found, before they were stored"
_KERNELS = "which kernels compute, or how they are prepared"
_WRITER = "which program wrote the file"
_OTHER_KEY = "another key says the same"
_ELSEWHERE = "read beside other values of other keys"

_GPTQ: Mapping[str, str] = {
    **dict.fromkeys(("act_group_aware", "batch_size", "cache_block_outputs", "damp_auto_increment"), _HOW),
    **dict.fromkeys(("damp_percent", "dataset", "model_seqlen", "mse", "pad_token_id", "static_groups"), _HOW),
    **dict.fromkeys(("tokenizer", "true_sequential"), _HOW),
    **dict.fromkeys(("block_name_to_quantize", "module_name_preceding_first_block"), _HOW),
    **dict.fromkeys(("backend", "disable_exllama", "exllama_config", "max_input_length", "use_exllama"), _KERNELS),
    **dict.fromkeys(("pack_impl", "use_cuda_fp16"), _KERNELS),
    **dict.fromkeys(("format", "q_group_size"), _OTHER_KEY),
    **dict.fromkeys(("meta", "model_file_base_name", "model_name_or_path"), _WRITER),
    "pack_dtype": _TENSORS,
}
_AWQ: Mapping[str, str] = {
    # transformers writes them of either method.
    **_GPTQ,
    **dict.fromkeys(("do_fuse", "fuse_max_seq_len", "modules_to_fuse"), _KERNELS),
    **dict.fromkeys(("checkpoint_format", "w_bit"), _OTHER_KEY),
    "quant_dtype": _TENSORS,
    **dict.fromkeys(("desc_act", "sym"), "inputs are in order, and zero points are stored"),
}
_COMPRESSED_TENSORS: Mapping[str, str] = {
    **dict.fromkeys(("input_activations", "output_activations"), _ACTIVATIONS),
    **dict.fromkeys(("global_compression_ratio", "version"), _WRITER),
    **dict.fromkeys(("actorder", "scale_dtype", "zp_dtype"), _TENSORS),
    **dict.fromkeys(("observer", "observer_kwargs"), _HOW),
    **dict.fromkeys(("block_structure", "format", "group_size", "strategy"), _ELSEWHERE),
    **dict.fromkeys(("quantization_status", "run_compressed"), "weights are stored quantised or not, as tensors show"),
    "dynamic": "weights are stored quantised",
    "kv_cache_scheme": _CACHE,
    "sparsity_config": "read where the format is not dense",
}
_FP8: Mapping[str, str] = {
    **dict.fromkeys(("activation_scheme", "scale_fmt"), _ACTIVATIONS),
    "dequantize": _KERNELS,
    "fmt": _TENSORS,
    "ignored_layers": _OTHER_KEY,
}
_MODELOPT: Mapping[str, str] = {
    **dict.fromkeys(("config_groups", "exclude_modules"), _OTHER_KEY),
    **dict.fromkeys(("kv_cache_quant_algo", "kv_cache_scheme"), _CACHE),
    **dict.fromkeys(("producer", "version"), _WRITER),
}
_QUARK: Mapping[str, str] = {
    **dict.fromkeys(("input_tensors", "output_tensors", "softmax_quant_spec"), _ACTIVATIONS),
    **dict.fromkeys(("kv_cache_group", "kv_cache_post_rope", "kv_cache_quant_config", "min_kv_scale"), _CACHE),
    **dict.fromkeys(("algo_config", "observer_cls", "qat_spec", "quant_mode", "round_method"), _HOW),
    **dict.fromkeys(
        ("scale_calculation_mode", "scale_type", "target_device", "is_scale_quant", "weight_merge_groups"), _HOW
    ),
    **dict.fromkeys(("block_size", "group_size", "scale_format", "zero_point_type", "mx_element_dtype"), _ELSEWHERE),
    **dict.fromkeys(("log_severity_level", "version"), _WRITER),
}

# Quark's, where layers of Linear have a configuration of their own.
_REPLACED = "global_quant_config"

WITHOUT_EFFECT: Mapping[str, Mapping[str, str]] = {
    "awq": _AWQ,
    "compressed-tensors": _COMPRESSED_TENSORS,
    "fbgemm_fp8": {**_FP8, "activation_scale_ub": _ACTIVATIONS},
    "fp8": _FP8,
    "gguf": {},
    "gptq": _GPTQ,
    "modelopt": _MODELOPT,
    "modelopt_fp4": _MODELOPT,
    "mxfp4": {"modules_to_not_convert": _TENSORS, "dequantize": _KERNELS},
    "quark": _QUARK,
}
"""Reasons by method and key, wherever the key is; what is inside such an object has no effect either."""


def unknown_keys(method: str, unread: list[str]) -> list[str]:
    """The `unread` paths of which nothing is known, sorted."""
    known = WITHOUT_EFFECT[method].keys()
    return sorted(path for path in unread if not (path == _REPLACED or known & path.split(".")))
