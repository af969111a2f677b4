"""Default sampling parameters, from the generation configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from shared.errors import InvalidRequestError
from shared.model_files.model_dir import GENERATION_CONFIG, ModelDirectoryError, read_json, read_json_if_any
from shared.request.limits import ModelLimits
from shared.request.sampling_params import NO_OPTIONS, SamplingOptions, SamplingParams, check_sampling

# A request that sets no optional parameter.
_NEUTRAL = SamplingParams(max_tokens=1)

_NOT_HERE = "a request may ask for as many answers as it likes, and none is searched for by beams"
_OF_CALLS = "how transformers' generate() computes and what it returns, not what is drawn"
_OF_DRAFTS = "drafts are the cell's settings, and change no answer"
WITHOUT_EFFECT: Mapping[str, str] = {
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id", "pad_token_id"), "the tokenizer begins a prompt"),
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "early_stopping"), _NOT_HERE),
    **dict.fromkeys(("diversity_penalty", "length_penalty"), _NOT_HERE),
    **dict.fromkeys(
        ("cache_config", "cache_implementation", "compile_config", "use_cache", "return_legacy_cache"), _OF_CALLS
    ),
    **dict.fromkeys(("low_memory", "prefill_chunk_size", "max_time", "disable_compile"), _OF_CALLS),
    **dict.fromkeys(("output_attentions", "output_hidden_states", "output_logits", "output_scores"), _OF_CALLS),
    **dict.fromkeys(("return_dict_in_generate", "renormalize_logits"), _OF_CALLS),
    **dict.fromkeys(("continuous_batching_config", "max_cache_len", "remove_invalid_values"), _OF_CALLS),
    **dict.fromkeys(
        ("assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight"), _OF_DRAFTS
    ),
    **dict.fromkeys(
        ("assistant_lookbehind", "is_assistant", "max_matching_ngram_size", "target_lookbehind"), _OF_DRAFTS
    ),
    **dict.fromkeys(("num_assistant_tokens", "num_assistant_tokens_schedule", "prompt_lookup_num_tokens"), _OF_DRAFTS),
    **dict.fromkeys(("speculation_type", "use_mtp"), _OF_DRAFTS),
    "do_sample": "a temperature of 0 is greedy",
    "eos_token_id": "read where a cell starts",
    "max_length": "a context is as long as the model's",
    "transformers_version": "which release wrote the file",
}
"""Keys of the file that are not read here, each with the reason why that changes nothing in what is drawn."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """None means no default. Units and ranges are those of `lockstep.v1.SamplingParams`."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


def sampling_defaults(model_dir: Path, limits: ModelLimits) -> SamplingDefaults:
    """Read the defaults, as vLLM does with `--generation-config auto`.

    Values are used whatever `do_sample` says; null counts as absent. As there, whole numbers may be written as 50.0,
    and a `top_k` that keeps every token (-1, or more than there are) is off, which is 0 here.

    Raises:
        ModelDirectoryError: the file is malformed, or a value is outside the range for requests.
    """
    if not (model_dir / GENERATION_CONFIG).exists():
        return SamplingDefaults()
    config = read_json(model_dir, GENERATION_CONFIG)
    defaults = SamplingDefaults(
        max_tokens=_whole(config, "max_new_tokens"),
        temperature=_number(config, "temperature"),
        top_k=_top_k(config, limits.logits_width),
        top_p=_number(config, "top_p"),
        min_p=_number(config, "min_p"),
        repetition_penalty=_number(config, "repetition_penalty"),
        presence_penalty=_number(config, "presence_penalty"),
        frequency_penalty=_number(config, "frequency_penalty"),
    )
    try:
        check_sampling(_as_asked_for(defaults), limits, prefix="")
    except InvalidRequestError as error:
        raise ModelDirectoryError(f"{GENERATION_CONFIG}: {error.message}") from error
    return defaults


def unknown_options(model_dir: Path) -> list[str]:
    """The keys of the file that are not read, and of which nothing is known, sorted."""
    config = read_json_if_any(model_dir, GENERATION_CONFIG)
    read = {"max_new_tokens", *(field.name for field in fields(SamplingDefaults))}
    given = {name for name, value in config.items() if value is not None and not name.startswith("_")}
    return sorted(given - read - WITHOUT_EFFECT.keys())


def _whole(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    if type(value) is float and value.is_integer():
        return int(value)
    if value is None or type(value) is int:
        return value
    raise ModelDirectoryError(f"{GENERATION_CONFIG}: {name} is {value!r}, not a whole number")


def _top_k(config: Mapping[str, Any], logits_width: int) -> int | None:
    top_k = _whole(config, "top_k")
    return 0 if top_k is not None and (top_k == -1 or top_k > logits_width) else top_k


def _number(config: Mapping[str, Any], name: str) -> float | None:
    value = config.get(name)
    if value is None or type(value) in {int, float}:
        return value
    raise ModelDirectoryError(f"{GENERATION_CONFIG}: {name} is {value!r}, not a number")


def _as_asked_for(defaults: SamplingDefaults) -> SamplingParams:
    def given(name: str, neutral: float) -> Any:
        value = getattr(defaults, name)
        return neutral if value is None else value

    return SamplingParams(
        max_tokens=given("max_tokens", _NEUTRAL.max_tokens),
        temperature=given("temperature", _NEUTRAL.temperature),
        top_k=given("top_k", _NEUTRAL.top_k),
        top_p=given("top_p", _NEUTRAL.top_p),
        options=SamplingOptions(
            min_p=given("min_p", NO_OPTIONS.min_p),
            repetition_penalty=given("repetition_penalty", NO_OPTIONS.repetition_penalty),
            presence_penalty=given("presence_penalty", NO_OPTIONS.presence_penalty),
            frequency_penalty=given("frequency_penalty", NO_OPTIONS.frequency_penalty),
        ),
    )
