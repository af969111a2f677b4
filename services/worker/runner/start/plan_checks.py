"""Whether a model is one that a worker's flags ask something of, found before its weights are read."""

from __future__ import annotations

from collections.abc import Set

from services.worker.config import WorkerSettings
from services.worker.models.planning import PlannedModel
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.weights.weight_files import WeightFiles
from shared.model_files.model_dir import ModelDirectoryError


def check_plan(settings: WorkerSettings, plan: PlannedModel) -> None:
    """Check that the model has what the flags split, multiply or draft with.

    Raises:
        ModelDirectoryError: it has not.
    """
    is_generic = plan.model.implementation == "transformers"
    if settings.ep and is_generic:
        raise ModelDirectoryError(f"{plan.model_dir}: --ep cannot split experts in transformers' code; use --tp")
    if settings.ep and not plan.has_experts:
        raise ModelDirectoryError(f"{plan.model_dir}: the model has no experts for --ep to split")
    check_activations(settings, plan.packed_formats)
    if settings.activation_quantization == "fp8" and plan.options.dummy_seed is None:
        _check_encoding(plan)
    if settings.draft_proposer == "mtp" and is_generic:
        reason = "transformers' code has no layers for multi-token prediction; use --draft-proposer ngram"
        raise ModelDirectoryError(f"{plan.model_dir}: {reason}")
    if settings.draft_proposer == "mtp" and plan.model.mtp is None:
        raise ModelDirectoryError(f"{plan.model_dir}: no layers for multi-token prediction, as mtp needs")


def _check_encoding(plan: PlannedModel) -> None:
    """Check that FP8 is E4M3: no kernel multiplies with E5M2, and only the headers of the files say which one it is."""
    with WeightFiles(plan.model_dir) as files:
        headers = [files.header(name) for name in files.names]
    if not any(header is not None and header.dtype == "F8_E4M3" for header in headers):
        reason = "its FP8 is not E4M3, which --activation-quantization fp8 needs"
        raise ModelDirectoryError(f"{plan.model_dir}: {reason}")


def check_activations(settings: WorkerSettings, packed_formats: Set[MatrixFormat]) -> None:
    """Check that there is a matrix that quantised activations are multiplied with.

    Args:
        settings: The worker's.
        packed_formats: The formats of the model's matrices, as planned or as loaded.

    Raises:
        ModelDirectoryError: there is none.
    """
    if settings.activation_quantization == "fp8" and MatrixFormat.FP8 not in packed_formats:
        raise ModelDirectoryError(f"{settings.model_dir}: no matrices in FP8 for --activation-quantization fp8")
