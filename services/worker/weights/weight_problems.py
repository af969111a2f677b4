"""Collects a checkpoint's problems."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from shared.model_files.model_dir import ModelDirectoryError

# Most kinds of tensors listed per sort of problem. Layers are alike, so their tensors form one kind.
_MAX_LISTED = 8
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class WeightProblems:
    """Collects problems by sort, for one message of bounded length.

    Tensors whose names differ only in layer and expert numbers are one kind.
    """

    def __init__(self) -> None:
        self._sort_to_problems: defaultdict[str, dict[str, str]] = defaultdict(dict)

    def __bool__(self) -> bool:
        return bool(self._sort_to_problems)

    def add(self, sort: str, tensor: str, detail: str = "") -> None:
        """Record a problem, once per sort (a heading such as "missing") and tensor; `detail` follows the name."""
        self._sort_to_problems[sort].setdefault(tensor, detail)

    def tensors(self, sort: str) -> frozenset[str]:
        """The tensors with problems of a sort."""
        return frozenset(self._sort_to_problems.get(sort, ()))

    def error(self, model_dir: Path, hints: Sequence[str] = ()) -> ModelDirectoryError:
        """Make an error that lists all problems, after `hints` at their cause."""
        texts = [*hints, *(f"{sort}: {_listed(problems)}" for sort, problems in self._sort_to_problems.items())]
        return ModelDirectoryError(f"{model_dir}: weights and configuration do not match: {'; '.join(texts)}")


def _listed(problems: dict[str, str]) -> str:
    kind_to_names: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for name, detail in problems.items():
        kind_to_names[_NUMBER.sub("*", name), detail].append(name)
    texts = []
    for (kind, detail), names in list(kind_to_names.items())[:_MAX_LISTED]:
        # A kind is shown by the name of its first tensor, which can be searched for in the files.
        text = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more like {kind}"
        texts.append(f"{text} {detail}".rstrip())
    num_left = len(problems) - sum(len(names) for names in list(kind_to_names.values())[:_MAX_LISTED])
    if num_left:
        texts.append(f"and {num_left} more")
    return ", ".join(texts)
