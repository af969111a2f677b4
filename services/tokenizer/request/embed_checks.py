"""Turns an `EmbedRequest` into a checked request, each of whose prompts asks for its vector."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.request.checks import CheckedRequest, Prompt, check_prompt_list, text_bytes
from services.tokenizer.request.item_checks import ItemChecks
from services.tokenizer.text_size import MAX_INPUTS, check_text_bytes
from shared.errors import Violation
from shared.model_files.sentence_files import VectorRecipe
from shared.request.limits import ModelLimits
from shared.request.request_fields import raise_violations
from shared.request.sampling_params import Pooling, SamplingOptions, SamplingParams
from shared.tenants.client_keys import ANY_CLIENT, Client


@dataclass(frozen=True, slots=True)
class Vectors:
    """What the model makes of texts, if anything."""

    recipe: VectorRecipe | None
    problem: str = ""
    """Why there is no recipe, for the client; empty if there is one."""
    size: int = 0
    """The numbers of a vector; 0 without a recipe."""


def check_embed(
    request: tokenizer_pb2.EmbedRequest,
    *,
    model_name: str,
    limits: ModelLimits,
    vectors: Vectors,
    defaults: common_pb2.SamplingParams | None = None,  # noqa: ARG001 - nothing is sampled
    client: Client = ANY_CLIENT,
) -> CheckedRequest:
    """Check what can be checked before encoding; as `check_request`, and raises as it does."""
    items = ItemChecks(request, model_name, client, most_items=MAX_INPUTS)
    recipe, violations = vectors.recipe, items.violations
    if recipe is None:
        violations.append(Violation("model", "OUT_OF_RANGE", vectors.problem))
        raise_violations(violations)
    assert recipe is not None
    if request.HasField("dimensions") and not 1 <= request.dimensions <= vectors.size:
        violations.append(Violation("dimensions", "OUT_OF_RANGE", f"must be between 1 and {vectors.size}"))
    kept = request.truncate_prompt_tokens if request.HasField("truncate_prompt_tokens") else None
    if kept == 0:
        violations.append(Violation("truncate_prompt_tokens", "OUT_OF_RANGE", "must be at least 1"))
    prefix = _read_prefix(request, recipe, violations)
    prompts = check_prompt_list(request.prompts.prompts, limits, violations, num_kept=kept or 0, most=MAX_INPUTS)
    violations += [
        Violation(f"prompts.prompts[{index}].chat", "OUT_OF_RANGE", "must be text or token ids")
        for index, prompt in enumerate(request.prompts.prompts[:MAX_INPUTS])
        if prompt.HasField("chat")
    ]
    raise_violations(violations)
    check_text_bytes(sum(map(text_bytes, request.prompts.prompts)) + len(prefix.encode()) * len(prompts))
    sampling = SamplingParams(
        max_tokens=1, temperature=0.0, ignore_eos=True, options=SamplingOptions(pooling=Pooling(recipe.pooling))
    )
    texts = tuple(_prefixed(prompt, prefix) for prompt in prompts)
    return items.checked(texts, sampling, is_empty=True, max_prompt_tokens=kept)


def _read_prefix(request: tokenizer_pb2.EmbedRequest, recipe: VectorRecipe, violations: list[Violation]) -> str:
    """What is put before each text."""
    kind = request.input_type
    if kind not in tokenizer_pb2.InputType.values():
        violations.append(Violation("input_type", "OUT_OF_RANGE", "must be INPUT_TYPE_QUERY or INPUT_TYPE_DOCUMENT"))
        return ""
    if request.HasField("prompt_name"):
        if kind != tokenizer_pb2.INPUT_TYPE_UNSPECIFIED:
            violations.append(Violation("prompt_name", "OUT_OF_RANGE", "must be absent beside input_type"))
        if request.prompt_name not in recipe.prompts:
            names = ", ".join(sorted(recipe.prompts))
            violations.append(Violation("prompt_name", "OUT_OF_RANGE", f"must be one of the model's: {names}"))
        return recipe.prompts.get(request.prompt_name, "")
    if kind == tokenizer_pb2.INPUT_TYPE_QUERY:
        return recipe.query_prompt
    return recipe.document_prompt if kind == tokenizer_pb2.INPUT_TYPE_DOCUMENT else recipe.default_prompt


def _prefixed(prompt: Prompt, prefix: str) -> Prompt:
    return prefix + prompt if isinstance(prompt, str) else prompt
