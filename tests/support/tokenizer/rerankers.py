"""Directories of rerankers as they are published: with sentence-transformers' files, and without."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from shared.model_files.model_dir import CHAT_TEMPLATE, SENTENCE_MODEL_CONFIG, SENTENCE_MODULES, TOKENIZER

YES, NO = "yes", "no"
# As short as a template of the kind can be, for contexts that are.
SHORT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}{% endfor %}<|im_start|>"
)
# The template that is published with rerankers' files, in its form.
PAIR_TEMPLATE = """\
{%- set told = messages | selectattr("role", "eq", "system") | map(attribute="content") | first -%}
{%- set query = messages | selectattr("role", "eq", "query") | map(attribute="content") | first -%}
{%- set document = messages | selectattr("role", "eq", "document") | map(attribute="content") | first -%}
<|im_start|>user
<Instruct>: {{ told or "By default" }}
<Query>: {{ query }}
<Document>: {{ document }}<|im_end|>
<|im_start|>assistant
"""
_TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"}
_SCORER = {
    "idx": 1,
    "name": "1",
    "path": "1_LogitScore",
    "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
}


def add_labels(model_dir: Path) -> tuple[int, int]:
    """Make the labels tokens of a directory's tokenizer, which they are not of the tiny one; returns their ids."""
    path = model_dir / TOKENIZER
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_tokens([YES, NO])
    tokenizer.save(str(path))
    yes, no = tokenizer.token_to_id(YES), tokenizer.token_to_id(NO)
    assert yes is not None
    assert no is not None
    return yes, no


def write_reranker_files(
    model_dir: Path,
    labels: Mapping[str, Any],
    *,
    template: str | None = PAIR_TEMPLATE,
    config: Mapping[str, Any] | None = None,
    more_modules: tuple[dict[str, Any], ...] = (),
) -> None:
    """Write what sentence-transformers writes for a reranker with a LogitScore.

    Args:
        model_dir: The directory.
        labels: The content of LogitScore's configuration.
        template: The chat template; None leaves the directory's.
        config: The content of `config_sentence_transformers.json`.
        more_modules: Modules beside those of a reranker.
    """
    _write(model_dir / SENTENCE_MODULES, [_TRANSFORMER, _SCORER, *more_modules])
    (model_dir / "1_LogitScore").mkdir(exist_ok=True)
    _write(model_dir / "1_LogitScore" / "config.json", labels)
    _write(model_dir / SENTENCE_MODEL_CONFIG, config or {})
    if template is not None:
        (model_dir / CHAT_TEMPLATE).write_text(template, encoding="utf-8")


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
