"""The recipe of a model that makes vectors is what its files say, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shared.model_files.model_dir import SENTENCE_MODULES, ModelDirectoryError
from shared.model_files.sentence_files import read_vector_recipe
from tests.support.tokenizer.embedders import LAST, MEAN, PROMPTS, write_embedder_files


def test_the_files_as_published_are_a_recipe(tmp_path: Path) -> None:
    write_embedder_files(tmp_path)
    recipe = read_vector_recipe(tmp_path)
    assert (recipe.pooling, recipe.is_normalized, recipe.max_tokens) == ("last", True, None)
    assert (recipe.query_prompt, recipe.document_prompt, recipe.default_prompt) == (PROMPTS["query"], "", "")


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        (LAST, "last"),
        (MEAN, "mean"),
        ({"pooling_mode": "lasttoken", "embedding_dimension": 64}, "last"),
        ({"pooling_mode": ["mean"], "include_prompt": True}, "mean"),
        # sentence-transformers' default.
        ({"word_embedding_dimension": 64}, "mean"),
    ],
)
def test_the_pooling_is_read_in_either_form(tmp_path: Path, pooling: dict[str, Any], expected: str) -> None:
    write_embedder_files(tmp_path, pooling=pooling, kinds=("Transformer", "Pooling"))
    recipe = read_vector_recipe(tmp_path)
    assert (recipe.pooling, recipe.is_normalized) == (expected, False)


@pytest.mark.parametrize(
    ("config", "query", "document", "default"),
    [
        ({}, "", "", ""),
        ({"prompts": {"query": "q: ", "passage": "p: "}}, "q: ", "p: ", ""),
        ({"prompts": {"document": "d", "corpus": "c"}}, "", "d", ""),
        ({"prompts": {"query": None, "web": "w"}, "default_prompt_name": "web"}, "", "", "w"),
        ({"prompts": {"query": "q"}, "default_prompt_name": "query"}, "q", "", "q"),
        # sentence-transformers has a prompt of this name for every model.
        ({"default_prompt_name": "document"}, "", "", ""),
        ({"prompts": None, "default_prompt_name": None}, "", "", ""),
    ],
)
def test_prompts_are_found_as_in_sentence_transformers(
    tmp_path: Path, config: dict[str, Any], query: str, document: str, default: str
) -> None:
    write_embedder_files(tmp_path, config=config)
    recipe = read_vector_recipe(tmp_path)
    assert (recipe.query_prompt, recipe.document_prompt, recipe.default_prompt) == (query, document, default)


def test_the_length_that_the_publisher_gives_is_read(tmp_path: Path) -> None:
    write_embedder_files(tmp_path, sentence_config={"max_seq_length": 512, "do_lower_case": False})
    assert read_vector_recipe(tmp_path).max_tokens == 512


def test_a_directory_without_the_files_is_not_guessed(tmp_path: Path) -> None:
    with pytest.raises(ModelDirectoryError, match=r"has no modules\.json"):
        read_vector_recipe(tmp_path)


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"kinds": ("Transformer", "Pooling", "Dense", "Normalize")}, "Transformer, Pooling, Dense, Normalize"),
        ({"kinds": ("Transformer", "Normalize")}, "the modules are"),
        ({"kinds": ("Transformer",)}, "the modules are"),
        ({"pooling": {"pooling_mode_cls_token": True}}, "the pooling cls"),
        ({"pooling": {"pooling_mode": "weightedmean"}}, "the pooling weightedmean"),
        ({"pooling": {**MEAN, "pooling_mode_lasttoken": True}}, "the pooling mean and lasttoken"),
        ({"pooling": {"pooling_mode": 5}}, "the pooling 5"),
        ({"pooling": {**MEAN, "include_prompt": False}}, "include_prompt"),
        ({"config": {"prompts": ["q"]}}, "prompts is not"),
        ({"config": {"prompts": {"query": 5}}}, "prompts is not"),
        ({"config": {"default_prompt_name": "web"}}, "default_prompt_name is 'web'"),
        ({"config": {"default_prompt_name": ["web"]}}, "default_prompt_name"),
        ({"sentence_config": {"do_lower_case": True}}, "do_lower_case"),
        ({"sentence_config": {"max_seq_length": "512"}}, "max_seq_length is '512'"),
        ({"sentence_config": {"max_seq_length": 0}}, "max_seq_length is 0"),
    ],
)
def test_what_is_not_computed_here_is_refused_by_name(tmp_path: Path, files: dict[str, Any], problem: str) -> None:
    write_embedder_files(tmp_path, **files)
    with pytest.raises(ModelDirectoryError, match=problem):
        read_vector_recipe(tmp_path)


@pytest.mark.parametrize(
    "modules", ["{}", "[5]", "[", '[{"type": "Transformer"}, {"type": "Pooling", "path": "../x"}]']
)
def test_malformed_modules_are_refused(tmp_path: Path, modules: str) -> None:
    (tmp_path / SENTENCE_MODULES).write_text(modules, encoding="utf-8")
    with pytest.raises(ModelDirectoryError, match=r"modules\.json"):
        read_vector_recipe(tmp_path)
