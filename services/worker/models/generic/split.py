"""Which part of each layer of modelling code a rank computes, by transformers' own plan.

A layer whose result the plan gathers, or whose input it splits, is computed whole on each rank, as is what the plan
does not name. Of attention that is computed whole, so are keys and values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum

from torch import nn
from transformers import PreTrainedModel

from services.worker.models.generic.dry_run import UnservableError

_STYLES = {
    "replicated_with_grad_allreduce",
    # Latents that all heads share.
    "mla_kv_a_proj",
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
        self._whole: frozenset[str] = frozenset()
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
        self._whole = _with_norms_of_all_heads(model)

    def split_of(self, name: str) -> Split:
        """How the linear layer of this name is split."""
        if name.rpartition(".")[0] in self._whole:
            return Split.WHOLE
        style = next((style for pattern, style in self._styles.items() if pattern.fullmatch(name)), "")
        return Split(style) if style in {each.value for each in Split} else Split.WHOLE

    def whole_layers(self, names: list[str]) -> list[str]:
        """Kinds of these linear layers that each of several ranks computes whole; with `*` for numbers."""
        whole = [name for name in names if self._styles and self.split_of(name) is Split.WHOLE]
        return sorted({re.sub(r"\.\d+\.", ".*.", name) for name in whole})


def _with_norms_of_all_heads(model: PreTrainedModel) -> frozenset[str]:
    """Modules of attention that have a norm with weights of its own for each head, [heads, head_dim].

    The plan splits their heads, but not such weights: Cohere's, with `use_qk_norm`.
    """
    found = set()
    for name, module in model.named_modules():
        owner = name.rpartition(".")[0]
        shapes = [weight.shape for weight in module.parameters(recurse=False) if weight.ndim > 1]
        if not shapes or isinstance(module, (nn.Linear, nn.Embedding)):
            continue
        siblings = model.get_submodule(owner).children()
        sizes = {each.out_features for each in siblings if type(each) is nn.Linear}
        if any(shape.numel() in sizes for shape in shapes):
            found.add(owner)
    return frozenset(found)
