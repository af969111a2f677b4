"""Selects the function that loads an architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from services.worker.layers.shard import Shard
from services.worker.models.deepseek_v2 import load_deepseek_v2
from services.worker.models.deepseek_v3 import load_deepseek_v3
from services.worker.models.deepseek_v32 import load_deepseek_v32
from services.worker.models.gemma3 import load_gemma3
from services.worker.models.glm4_moe import load_glm4_moe, load_glm4v_moe
from services.worker.models.glm4_moe_lite import load_glm4_moe_lite
from services.worker.models.glm_moe_dsa import load_glm_moe_dsa
from services.worker.models.gpt_oss import load_gpt_oss
from services.worker.models.llama import load_llama, load_mistral, load_qwen2
from services.worker.models.ministral3 import load_ministral3
from services.worker.models.mistral3 import load_mistral3
from services.worker.models.mixtral import load_mixtral
from services.worker.models.protocol import CausalLM
from services.worker.models.qwen3 import load_qwen3
from services.worker.models.qwen3_5 import load_qwen3_5, load_qwen3_5_moe
from services.worker.models.qwen3_moe import load_qwen3_moe
from services.worker.models.qwen3_next import load_qwen3_next
from services.worker.models.qwen_vl import load_qwen2_vl, load_qwen3_vl, load_qwen3_vl_moe
from shared.model_files.implementations import WantedImplementation, implementation_of
from shared.model_files.model_dir import ModelDirectoryError, architecture_of
from shared.release import install_advice

__all__ = ["CausalLM", "ModelLoader", "code_of", "loader_for"]

# Loads a rank's part of a model from what `model_dir.read_config` returns. Raises ModelDirectoryError if configuration
# or weights are not those of such a model.
ModelLoader = Callable[[Mapping[str, Any], Shard], CausalLM]

# The architectures of `shared.model_files.model_dir.ARCHITECTURES`.
_ARCHITECTURES: dict[str, ModelLoader] = {
    "DeepseekV2ForCausalLM": load_deepseek_v2,
    "DeepseekV3ForCausalLM": load_deepseek_v3,
    "DeepseekV32ForCausalLM": load_deepseek_v32,
    "Gemma3ForCausalLM": load_gemma3,
    "Gemma3ForConditionalGeneration": load_gemma3,
    "Glm4MoeForCausalLM": load_glm4_moe,
    "Glm4MoeLiteForCausalLM": load_glm4_moe_lite,
    "Glm4vMoeForConditionalGeneration": load_glm4v_moe,
    "GlmMoeDsaForCausalLM": load_glm_moe_dsa,
    "GptOssForCausalLM": load_gpt_oss,
    "KimiK25ForConditionalGeneration": load_deepseek_v3,
    "Kimi_K25ForConditionalGeneration": load_deepseek_v3,
    "LlamaForCausalLM": load_llama,
    "Ministral3ForCausalLM": load_ministral3,
    "MinistralForCausalLM": load_mistral,
    "Mistral3ForConditionalGeneration": load_mistral3,
    "MistralForCausalLM": load_mistral,
    "MixtralForCausalLM": load_mixtral,
    "Qwen2ForCausalLM": load_qwen2,
    "Qwen2VLForConditionalGeneration": load_qwen2_vl,
    "Qwen2_5_VLForConditionalGeneration": load_qwen2_vl,
    "Qwen3ForCausalLM": load_qwen3,
    "Qwen3MoeForCausalLM": load_qwen3_moe,
    "Qwen3NextForCausalLM": load_qwen3_next,
    "Qwen3VLForConditionalGeneration": load_qwen3_vl,
    "Qwen3VLMoeForConditionalGeneration": load_qwen3_vl_moe,
    "Qwen3_5ForCausalLM": load_qwen3_5,
    "Qwen3_5ForConditionalGeneration": load_qwen3_5,
    "Qwen3_5MoeForCausalLM": load_qwen3_5_moe,
    "Qwen3_5MoeForConditionalGeneration": load_qwen3_5_moe,
}
# Architectures with layers for multi-token prediction, and the loaders that load those too.
_WITH_MTP: dict[str, ModelLoader] = {
    "DeepseekV3ForCausalLM": partial(load_deepseek_v3, with_mtp=True),
    "DeepseekV32ForCausalLM": partial(load_deepseek_v32, with_mtp=True),
    "Glm4MoeForCausalLM": partial(load_glm4_moe, with_mtp=True),
    "Glm4MoeLiteForCausalLM": partial(load_glm4_moe_lite, with_mtp=True),
    "GlmMoeDsaForCausalLM": partial(load_glm_moe_dsa, with_mtp=True),
    "KimiK25ForConditionalGeneration": partial(load_deepseek_v3, with_mtp=True),
    "Kimi_K25ForConditionalGeneration": partial(load_deepseek_v3, with_mtp=True),
    "Qwen3NextForCausalLM": partial(load_qwen3_next, with_mtp=True),
    "Qwen3_5ForCausalLM": partial(load_qwen3_5, with_mtp=True),
    "Qwen3_5ForConditionalGeneration": partial(load_qwen3_5, with_mtp=True),
    "Qwen3_5MoeForCausalLM": partial(load_qwen3_5_moe, with_mtp=True),
    "Qwen3_5MoeForConditionalGeneration": partial(load_qwen3_5_moe, with_mtp=True),
}


def loader_for(
    config: Mapping[str, Any], *, with_mtp: bool = False, wanted: WantedImplementation = "lockstep"
) -> ModelLoader:
    """The loader of the first supported architecture that `config` names.

    Args:
        config: What `read_config` returns.
        with_mtp: Whether to load layers for multi-token prediction too, if there are any.
        wanted: Whose code computes the model.

    Raises:
        ModelDirectoryError: no architecture is supported, or transformers is needed and not installed.
    """
    if implementation_of(config, wanted) == "transformers":
        return _generic_loader()
    name = architecture_of(config)
    return _WITH_MTP.get(name, _ARCHITECTURES[name]) if with_mtp else _ARCHITECTURES[name]


def code_of(config: Mapping[str, Any], wanted: WantedImplementation) -> str:
    """`CausalLM.code` of the model that `loader_for` loads, with the same arguments; raises as it does."""
    if implementation_of(config, wanted) == "lockstep":
        return ""
    _generic_loader()
    from services.worker.models.generic.identity import identity_of_model  # noqa: PLC0415

    return identity_of_model(config)


def _generic_loader() -> ModelLoader:
    """The loader of transformers' classes. It alone imports them, which takes seconds."""
    try:
        from services.worker.models.generic.load import load_generic  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "transformers":
            raise
        raise ModelDirectoryError(
            "config.json: this architecture is served by the code of transformers, which is not installed: "
            f"{install_advice(['worker-transformers'])}"
        ) from error
    return load_generic
