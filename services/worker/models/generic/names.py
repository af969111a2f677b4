"""What a checkpoint calls the parameters of modelling code: transformers' conversions, inverted for each read."""

from __future__ import annotations

import re
from dataclasses import dataclass

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from services.worker.models.generic.dry_run import UnservableError
from services.worker.weights.model_weights import ModelWeights

_ROWS = 1


@dataclass(frozen=True, slots=True)
class StackNames:
    """The tensors that a stack of experts' matrices is made of; `*` stands for an expert's number."""

    parts: tuple[str, ...]
    """Side by side along the rows."""

    def of(self, expert: int) -> list[str]:
        """The names of one expert's parts, without `.weight`."""
        return [part.replace("*", str(expert)).removesuffix(".weight") for part in self.parts]


class StoredNames:
    """Names of tensors in the checkpoint, by name in the model."""

    def __init__(self, model: PreTrainedModel, weights: ModelWeights) -> None:
        transforms = get_model_conversion_mapping(model, add_legacy=False)
        self._renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        self._converters = [each for each in transforms if isinstance(each, WeightConverter)]
        self._reversed = [each.reverse_transform() for each in reversed(self._renamings)]
        self._weights = weights
        self._prefix = f"{model.base_model_prefix}."

    def tensor(self, name: str) -> str:
        """The stored name of a whole parameter or buffer.

        Raises:
            UnservableError: it is made of others.
        """
        if converter := self._converter(name):
            raise UnservableError(f"{name} is converted from {', '.join(converter.source_patterns)}")
        # A base model that is published alone has no prefix.
        if found := next((each for each in (name, name.removeprefix(self._prefix)) if each in self._weights), None):
            return found
        stored = self._rename(name)
        back, _ = rename_source_key(stored, self._renamings, [])
        if back != name:
            raise UnservableError(f"the stored name of {name} is not known")
        return stored

    def module(self, name: str) -> str:
        """The stored name of a layer whose matrix is `{name}.weight`, which may be packed under other names."""
        return self.tensor(f"{name}.weight").removesuffix(".weight")

    def stack(self, name: str) -> StackNames | None:
        """The parts of a stack that is stored by expert; None if it is stored whole.

        Raises:
            UnservableError: it is converted in another way.
        """
        converter = self._converter(name)
        if converter is None or name in self._weights:
            return None
        operations = converter.operations
        is_merge = isinstance(operations[0], MergeModulelist) and operations[0].dim == 0
        is_joined = len(operations) == 1 or (
            len(operations) == len(converter.source_patterns) == 2
            and isinstance(operations[1], Concatenate)
            and operations[1].dim == _ROWS
        )
        if not (is_merge and is_joined):
            raise UnservableError(f"{name} is converted from {', '.join(converter.source_patterns)}")
        target = converter.target_patterns[0]
        # The last occurrence: the pattern ends a name.
        start = name.rindex(target)
        parts = tuple(
            self._rename(name[:start] + _literal(source) + name[start + len(target) :])
            for source in converter.source_patterns
        )
        return StackNames(parts)

    def _rename(self, name: str) -> str:
        for renaming in self._reversed:
            name, _ = renaming.rename_source_key(name)
        return name

    def _converter(self, name: str) -> WeightConverter | None:
        """The conversion that gives a parameter."""
        return next((each for each in self._converters if any(t in name for t in each.target_patterns)), None)


def _literal(pattern: str) -> str:
    """A pattern of stored names as a name."""
    return re.sub(r"\\(.)", r"\1", pattern)
