"""Recipes that publishers describe in words alone, by the models that they are for."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KnownRecipe:
    """A recipe whose labels are texts, each a token of the model's tokenizer."""

    template: str
    labels: tuple[str, str]
    """The positive label, and the other one."""
    names: re.Pattern[str]
    """The models' names, whole."""


_QWEN3_RERANKER = """\
{{- '<|im_start|>system\\nJudge whether the Document meets the requirements based on the Query and the Instruct \
provided. Note that the answer can only be "yes" or "no".<|im_end|>\\n<|im_start|>user\\n<Instruct>: ' -}}
{{- messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | first \
| default('Given a web search query, retrieve relevant passages that answer the query') -}}
{{- '\\n<Query>: ' -}}
{{- messages | selectattr('role', 'equalto', 'query') | map(attribute='content') | first -}}
{{- '\\n<Document>: ' -}}
{{- messages | selectattr('role', 'equalto', 'document') | map(attribute='content') | first -}}
{{- '<|im_end|>\\n<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' -}}
"""

KNOWN_RECIPES = {
    # Source: the model cards of Qwen/Qwen3-Reranker-0.6B, -4B and -8B, "Transformers Usage".
    "qwen3-reranker": KnownRecipe(_QWEN3_RERANKER, ("yes", "no"), re.compile(r"(Qwen/)?Qwen3-Reranker-(0\.6|4|8)B")),
}
"""By the names that settings give them."""
