"""Whose code computes a model: ours, or transformers'. Data, so that launchers can tell without either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from shared.model_files.model_dir import (
    ARCHITECTURES,
    CONFIG,
    ModelDirectoryError,
    architecture_of,
    architectures_of,
)
from shared.model_files.text_models import TEXT_MODELS

Implementation = Literal["lockstep", "transformers"]
WantedImplementation = Literal["auto", "lockstep", "transformers"]

MODEL_IMPL_DESCRIPTION = (
    "Whose code computes the model: lockstep is Lockstep's own, transformers is the class that this library has, with "
    "Lockstep's attention, products and KV cache; auto is lockstep where it has the architecture, and transformers for "
    "those that are tested with it. Any other architecture needs transformers by name, and is refused at start if "
    "random weights show that sequences which share a step change each other's results."
)

TRANSFORMERS_ARCHITECTURES = (
    "AXK1ForCausalLM",
    "AfmoeForCausalLM",
    "ApertusForCausalLM",
    "ArceeForCausalLM",
    "Cohere2ForCausalLM",
    "Cohere2MoeForCausalLM",
    "CohereForCausalLM",
    "CwmForCausalLM",
    "DiffLlamaForCausalLM",
    "Dots1ForCausalLM",
    "Ernie4_5ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "Exaone4ForCausalLM",
    "ExaoneMoeForCausalLM",
    "FlexOlmoForCausalLM",
    "FlintForCausalLM",
    "GPT2LMHeadModel",
    "GPTBigCodeForCausalLM",
    "GPTNeoXForCausalLM",
    "GemmaForCausalLM",
    "Glm4ForCausalLM",
    "GlmForCausalLM",
    "GraniteForCausalLM",
    "GraniteMoeForCausalLM",
    "GraniteMoeSWAForCausalLM",
    "GraniteMoeSharedForCausalLM",
    "GraniteSWAForCausalLM",
    "HYV3ForCausalLM",
    "HeliumForCausalLM",
    "HunYuanDenseV1ForCausalLM",
    "HunYuanMoEV1ForCausalLM",
    "HyperCLOVAXForCausalLM",
    "Jais2ForCausalLM",
    "Kolibri1ForCausalLM",
    "LagunaForCausalLM",
    "MellumForCausalLM",
    "MiMoV2FlashForCausalLM",
    "MiniCPM3ForCausalLM",
    "MiniMaxM2ForCausalLM",
    "ModernBertDecoderForCausalLM",
    "NanoChatForCausalLM",
    "NemotronForCausalLM",
    "OPTForCausalLM",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "OlmoForCausalLM",
    "OlmoeForCausalLM",
    "PersimmonForCausalLM",
    "Phi3ForCausalLM",
    "PhiForCausalLM",
    "PhimoeForCausalLM",
    "Qwen2MoeForCausalLM",
    "SeedOssForCausalLM",
    "SmolLM3ForCausalLM",
    "SolarOpenForCausalLM",
    "Starcoder2ForCausalLM",
    "YoutuForCausalLM",
)
"""What is tested with transformers' code, beside `ARCHITECTURES`."""

_GGUF = "gguf"
"""The `quant_method` of blocks that `lockstep import` keeps."""

TESTED_TRANSFORMERS = ("5.23",)
"""The releases of transformers with which that was tested."""


def implementation_of(config: Mapping[str, Any], wanted: WantedImplementation) -> Implementation:
    """Whose code computes the model that config.json describes.

    Raises:
        ModelDirectoryError: none does that is wanted; the message says which architectures are served, or what else
            transformers' code is not run for.
    """
    names = architectures_of(config)
    is_ours = any(name in ARCHITECTURES for name in names)
    is_theirs = wanted == "auto" and not is_ours and bool(names) and names[0] in TRANSFORMERS_ARCHITECTURES
    if wanted == "transformers" or is_theirs:
        _check_generic(config, names, wanted)
        return "transformers"
    try:
        architecture_of(config)
    except ModelDirectoryError as error:
        if is_ours or not names:
            raise
        raise ModelDirectoryError(f"{error}; {_advice(names[0], wanted)}") from error
    return "lockstep"


def _check_generic(config: Mapping[str, Any], names: Sequence[str], wanted: WantedImplementation) -> None:
    if text := [name for name in names[:1] if name in TEXT_MODELS]:
        raise ModelDirectoryError(f"{CONFIG}: only the text of {text[0]} is served, by --model-impl lockstep")
    quantisation = config.get("quantization_config")
    if isinstance(quantisation, Mapping) and quantisation.get("quant_method") == _GGUF:
        other = "" if wanted == "auto" else f", or this one without --model-impl {wanted}"
        raise ModelDirectoryError(
            f"{CONFIG}: GGUF's blocks are not read for transformers' code; serve a safetensors checkpoint{other}"
        )


def _advice(name: str, wanted: WantedImplementation) -> str:
    if name in TRANSFORMERS_ARCHITECTURES:
        return f"{name} is served by transformers' code, without --model-impl {wanted}"
    tested = ", ".join(TRANSFORMERS_ARCHITECTURES)
    return f"with transformers' code: {tested}, and others that it has with --model-impl transformers"
