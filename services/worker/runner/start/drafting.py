"""Makes the configured draft proposer for a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from services.worker.config import WorkerSettings
from services.worker.drafts.draft_model import DraftModelProposer
from services.worker.drafts.drafter import Drafting, DraftProposer
from services.worker.drafts.mtp_drafts import MtpProposer
from services.worker.drafts.ngram_drafts import NgramProposer
from services.worker.layers.context_limit import ContextLimit
from services.worker.models.loader import LoadedModel, LoadOptions, load_model
from services.worker.models.planning import PlannedModel, plan_model
from services.worker.ops import Ops
from services.worker.parallel.communicator import SINGLE, Parallel
from shared.model_files.model_dir import TOKENIZER, ModelDirectoryError, read_json


def check_drafting(
    settings: WorkerSettings, plan: PlannedModel, ops: Ops, *, parallel: Parallel = SINGLE
) -> PlannedModel | None:
    """Plan the draft model, if there is one, for the model `plan`.

    Raises:
        ModelDirectoryError: it cannot be planned, has recurrent layers or another vocabulary.
    """
    if settings.draft_model is None:
        return None
    options = _draft_options(plan.options, plan.model.context_length, parallel)
    draft = plan_model(settings.draft_model, ops, plan.model.dtype, options=options)
    if draft.model.state_spec.layers:
        # Unlike keys and values, its states could not be computed again from where a draft was rejected.
        raise ModelDirectoryError(f"{draft.model_dir}: a draft model with recurrent layers is not supported")
    _check_fit(plan, draft, has_texts=options.dummy_seed is None)
    return draft


def make_drafting(
    settings: WorkerSettings,
    loaded: LoadedModel,
    ops: Ops,
    on_progress: Callable[[], None],
    *,
    parallel: Parallel = SINGLE,
) -> Drafting | None:
    """How to draft for a `loaded` model whose plan `check_plan` and `check_drafting` accept; None if drafting is off.

    Args:
        on_progress: Called while a draft model loads; raising in it ends the loading.
        parallel: The ranks that the model is split over, which must draft alike.

    Raises:
        ModelDirectoryError: the draft model cannot be loaded, or is another one on another rank.
    """
    if settings.draft_proposer == "none":
        return None
    proposer = _make_proposer(settings, loaded, ops, on_progress, parallel)
    return Drafting(proposer, settings.num_draft_tokens)


def _make_proposer(
    settings: WorkerSettings, loaded: LoadedModel, ops: Ops, on_progress: Callable[[], None], parallel: Parallel
) -> DraftProposer:
    if settings.draft_proposer == "ngram":
        return NgramProposer()
    if settings.draft_proposer == "mtp":
        assert loaded.model.mtp is not None, "checked by the plan"
        return MtpProposer(loaded.model.mtp, ops)
    assert settings.draft_model is not None, "checked by the settings"
    of_model = LoadOptions(
        dummy_seed=settings.weights_seed,
        device=loaded.device,
        quantization=loaded.quantization,
        kv_dtype=loaded.kv_dtype,
        packed=settings.packed_weights,
    )
    options = _draft_options(of_model, loaded.facts.context_length, parallel)
    draft = load_model(settings.draft_model, ops, loaded.model.dtype, lambda _: on_progress(), options=options)
    return DraftModelProposer(draft.model, ops)


def _draft_options(options: LoadOptions, context_length: int, parallel: Parallel) -> LoadOptions:
    """What a draft model is loaded with for a model with these options.

    It is whole on every rank: splitting a small model costs more than it saves.
    """
    # It may draft only for the beginning of a sequence.
    context = ContextLimit(context_length, may_exceed_model=True)
    return replace(options, with_mtp=False, context=context, readers=parallel.ep or parallel.tp)


def _check_fit(plan: PlannedModel, draft: PlannedModel, *, has_texts: bool) -> None:
    """Raise ModelDirectoryError if the vocabularies differ; without texts compare only sizes."""
    whose = f"{draft.model_dir} cannot draft for {plan.model_dir}"
    size, draft_size = plan.model.logits_width, draft.model.logits_width
    if size != draft_size:
        raise ModelDirectoryError(f"{whose}: its vocabulary has {draft_size} tokens, not {size}")
    if not has_texts:
        return
    tokens, draft_tokens = _vocabulary(plan.model_dir), _vocabulary(draft.model_dir)
    if different := tokens.items() ^ draft_tokens.items():
        token_id = min(token_id for token_id, _ in different)
        raise ModelDirectoryError(
            f"{whose}: {TOKENIZER} differs; token {token_id} is {draft_tokens.get(token_id)!r}, "
            f"not {tokens.get(token_id)!r}"
        )


def _vocabulary(model_dir: Path) -> dict[int, str]:
    """Token texts by id.

    Raises:
        ModelDirectoryError: tokenizer.json is missing or malformed.
    """
    content = read_json(model_dir, TOKENIZER)
    try:
        vocabulary = content["model"]["vocab"]
        # Unigram models list pieces with scores; the others map pieces to ids.
        texts = [piece for piece, _ in vocabulary] if isinstance(vocabulary, list) else list(vocabulary)
        ids = range(len(texts)) if isinstance(vocabulary, list) else vocabulary.values()
        id_to_text = {int(token_id): str(text) for token_id, text in zip(ids, texts, strict=True)}
        added = {int(token["id"]): str(token["content"]) for token in content.get("added_tokens", ())}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelDirectoryError(f"{model_dir / TOKENIZER}: cannot read the vocabulary: {error!r}") from error
    return id_to_text | added
