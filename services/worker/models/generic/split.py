"""Which part of each layer of modelling code a rank computes, by transformers' own plan.

A layer whose result the plan gathers, or whose input it splits, is computed whole on each rank, as is what the plan
does not name. Of attention that is computed whole, so are keys and values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum

from transformers import PreTrainedModel

from services.worker.models.generic.dry_run import UnservableError

_STYLES = {
    "replicated_with_grad_allreduce",
    "colwise_gather_output",
    "rowwise_split_input",
    "moe_tp_experts",
    # Numbers for each head, which attention takes its part of.
    "local_params",
}


class Split(Enum):
    """How a linear layer is split over the ranks."""

    WHOLE = "whole"
    OUTPUTS = "colwise"
    """Each rank has a part of the outputs."""
    INPUTS = "rowwise"
    """Each rank has a part of the inputs; results are added up."""
    PACKED_OUTPUTS = "packed_colwise"
    """As `OUTPUTS`, of each half of the outputs."""


class SplitPlan:
    """How the linear layers of a model are split."""

    def __init__(self, model: PreTrainedModel, num_ranks: int) -> None:
        """Read the plan; on a single rank all is whole.

        Raises:
            UnservableError: there is no plan, or it has a style that is not known here.
        """
        self._styles: dict[re.Pattern[str], str] = {}
        if num_ranks == 1:
            return
        plan: Mapping[str, str] | None = getattr(model.config, "base_model_tp_plan", None)
        if not plan:
            raise UnservableError("transformers has no tensor-parallel plan for this architecture: use one rank")
        prefix = re.escape(f"{model.base_model_prefix}.")
        known = _STYLES | {each.value for each in Split}
        for pattern, style in plan.items():
            if style not in known:
                raise UnservableError(f"the tensor-parallel plan has the style {style}: use one rank")
            self._styles[re.compile(prefix + re.escape(pattern).replace(r"\*", r"\d+"))] = style

    def split_of(self, name: str) -> Split:
        """How the linear layer of this name is split."""
        style = next((style for pattern, style in self._styles.items() if pattern.fullmatch(name)), "")
        return Split(style) if style in {each.value for each in Split} else Split.WHOLE

    def whole_layers(self, names: list[str]) -> list[str]:
        """Kinds of layers that each rank computes whole, though the plan names them; with `*` for numbers."""
        kinds = {re.sub(r"\.\d+\.", ".*.", name) for name in names if self._styles and self._is_gathered(name)}
        return sorted(kinds)

    def _is_gathered(self, name: str) -> bool:
        gathered = ("colwise_gather_output", "rowwise_split_input")
        return any(style in gathered and pattern.fullmatch(name) for pattern, style in self._styles.items())
