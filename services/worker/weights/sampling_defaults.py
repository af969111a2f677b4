"""Default sampling parameters, from the generation configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import InvalidRequestError
from shared.limits import ModelLimits
from shared.model_dir import GENERATION_CONFIG, ModelDirectoryError, read_json
from shared.sampling_params import NO_OPTIONS, SamplingOptions, SamplingParams, check_sampling

# A request that sets no optional parameter.
_NEUTRAL = SamplingParams(max_tokens=1)


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
