"""The recipe by which a model rates pairs: found where it is declared, and never guessed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.tokenizer.config import TokenizerSettings
from services.tokenizer.request.model import ServedModel, load_model
from services.tokenizer.scores.score_pair import ScorePair
from shared.model_files.model_dir import SENTENCE_CONFIG, SENTENCE_MODULES, ModelDirectoryError
from tests.support.models.tiny_tokenizer import write_tiny_tokenizer
from tests.support.tokenizer.chat_templates import make_local_renderer
from tests.support.tokenizer.rerankers import PAIR_TEMPLATE, SHORT_TEMPLATE, add_labels, write_reranker_files

# The prompt of the card of Qwen3-Reranker, written as there.
CARD = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
CARD_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model whose directory says nothing of scores, and has a chat template."""
    path = tmp_path / "some-model"
    path.mkdir()
    write_tiny_tokenizer(path)
    return path


def load(directory: Path, **settings: Any) -> ServedModel:
    return load_model(TokenizerSettings(model_dir=directory, **settings), make_renderer=make_local_renderer)


def rendered(pair: ScorePair) -> str:
    return pair.template.render(pair.template.fields(pair.conversation), opens_turn=pair.conversation.opens_turn)


def refusal(directory: Path, **settings: Any) -> str:
    """Why pairs are refused."""
    scores = load(directory, **settings).scores
    assert scores.recipe is None
    assert scores.name == ""
    return scores.problem


def test_a_chat_model_has_no_recipe(directory: Path) -> None:
    add_labels(directory)
    assert "has no recipe" in refusal(directory)


@pytest.mark.parametrize("name", ["Qwen3-Reranker-0.6B", "Qwen/Qwen3-Reranker-4B", "Qwen/Qwen3-Reranker-8B"])
@pytest.mark.parametrize("by_setting", [False, True])
@pytest.mark.parametrize("instruction", ["", "Find the answer"])
def test_a_known_recipe_is_the_cards(directory: Path, name: str, instruction: str, *, by_setting: bool) -> None:
    labels = add_labels(directory)
    settings = {"score_template": "qwen3-reranker"} if by_setting else {"model_name": name}
    recipe = load(directory, **settings).scores.recipe
    assert recipe is not None
    assert (recipe.name, recipe.label_token_ids) == ("qwen3-reranker", labels)
    expected = CARD.format(instruction=instruction or CARD_INSTRUCTION, query=" the q\n", document="{d} ")
    assert rendered(recipe.pair(" the q\n", "{d} ", instruction)) == expected


@pytest.mark.parametrize("name", ["my-Qwen3-Reranker-0.6B", "Qwen3-Reranker-0.6B-tuned", "Qwen3-Reranker", "qwen3"])
def test_a_name_like_a_known_one_is_not_known(directory: Path, name: str) -> None:
    add_labels(directory)
    assert "has no recipe" in refusal(directory, model_name=name)


def test_a_known_name_on_another_tokenizer_is_no_recipe(directory: Path) -> None:
    assert "not both tokens" in refusal(directory, model_name="Qwen3-Reranker-0.6B")


def test_files_of_sentence_transformers_are_the_recipe(directory: Path) -> None:
    config = {"prompts": {"web": "Search", "code": "Find code"}, "default_prompt_name": "code"}
    write_reranker_files(directory, {"true_token_id": 70, "false_token_id": 71}, config=config)
    model = load(directory)
    recipe = model.scores.recipe
    assert recipe is not None
    assert (recipe.name, recipe.label_token_ids) == ("sentence-transformers", (70, 71))
    body = "<|im_start|>user\n<Instruct>: {}\n<Query>: q\n<Document>: d<|im_end|>\n<|im_start|>assistant"
    assert rendered(recipe.pair("q", "d")) == body.format("Find code")
    assert rendered(recipe.pair("q", "d", "Mine")) == body.format("Mine")
    # The template leaves out what a chat's user says.
    assert not model.prompts.has_chat_template


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"prompts": {"web": "Search"}},
        {"prompts": {"web": "Search"}, "default_prompt_name": "code"},
        {"prompts": {"web": None}, "default_prompt_name": "web"},
        {"prompts": ["Search"], "default_prompt_name": 0},
        {"prompts": {"web": "Search"}, "default_prompt_name": ["web"]},
    ],
)
def test_without_a_prompt_of_the_files_the_template_has_its_own(directory: Path, config: dict[str, Any]) -> None:
    write_reranker_files(directory, {"true_token_id": 70, "false_token_id": 71}, config=config)
    recipe = load(directory).scores.recipe
    assert recipe is not None
    assert "<Instruct>: By default\n" in rendered(recipe.pair("q", "d"))


@pytest.mark.parametrize("opens", [False, True])
def test_what_the_files_give_the_template_is_given(directory: Path, *, opens: bool) -> None:
    template = SHORT_TEMPLATE + "{{ tone }}{% if add_generation_prompt %}!{% endif %}"
    write_reranker_files(directory, {"true_token_id": 70, "false_token_id": 71}, template=template)
    given = {"chat_template": {"add_generation_prompt": opens, "tone": "dry", "max_length": 5}}
    (directory / SENTENCE_CONFIG).write_text(json.dumps({"processing_kwargs": given}), encoding="utf-8")
    model = load(directory)
    recipe = model.scores.recipe
    assert recipe is not None
    assert recipe.variables == {"tone": "dry"}
    assert rendered(recipe.pair("q", "d")).endswith("dry!" if opens else "dry")
    # This template shows a chat's messages, too.
    assert model.prompts.has_chat_template


@pytest.mark.parametrize(
    ("labels", "options", "problem"),
    [
        ({"true_token_id": 70, "false_token_id": None}, {}, "raw logit of one label"),
        ({"true_token_id": 70}, {}, "raw logit of one label"),
        ({"true_token_id": 70, "false_token_id": 100_000}, {}, "not both tokens"),
        ({"true_token_id": 70, "false_token_id": 71}, {"more_modules": ({"type": "a.b.Dense", "path": ""},)}, "Dense"),
        (
            {"true_token_id": 70, "false_token_id": 71},
            {"template": "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"},
            "does not show",
        ),
        ({"true_token_id": 70, "false_token_id": 71}, {"template": "{{ messages[0].content }}"}, "does not show"),
        (
            {"true_token_id": 70, "false_token_id": 71},
            {"template": "{{ messages[0].content }}{{ messages[1].content[0].text }}"},
            "does not show",
        ),
    ],
)
def test_files_that_are_no_recipe_are_refused_and_not_guessed(
    directory: Path, labels: dict[str, Any], options: dict[str, Any], problem: str
) -> None:
    add_labels(directory)
    write_reranker_files(directory, labels, **options)
    # A known name does not take the place of what the directory says.
    assert problem in refusal(directory, model_name="Qwen3-Reranker-0.6B")


@pytest.mark.parametrize(
    "labels",
    [
        {},
        {"true_token_id": "9"},
        {"true_token_id": 70, "false_token_id": 70},
        {"true_token_id": True},
        {"true_token_id": 70, "false_token_id": -1},
    ],
)
def test_malformed_files_are_named_at_start(directory: Path, labels: dict[str, Any]) -> None:
    write_reranker_files(directory, labels)
    with pytest.raises(ModelDirectoryError, match="1_LogitScore"):
        load(directory)


@pytest.mark.parametrize("path", ["../elsewhere", "/etc", 5, None])
def test_a_module_outside_of_the_directory_is_not_read(directory: Path, path: Any) -> None:
    modules = [{"type": "x.LogitScore", "path": path}]
    (directory / SENTENCE_MODULES).write_text(json.dumps(modules), encoding="utf-8")
    with pytest.raises(ModelDirectoryError, match=r"modules\.json: the path of LogitScore"):
        load(directory)


@pytest.mark.parametrize("text", ["{", "{}", "[1]", "[" * 10_000])
def test_a_malformed_list_of_modules_is_named(directory: Path, text: str) -> None:
    (directory / SENTENCE_MODULES).write_text(text, encoding="utf-8")
    with pytest.raises(ModelDirectoryError, match=r"modules\.json"):
        load(directory)


def test_modules_without_a_score_change_nothing(directory: Path) -> None:
    modules = [{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]
    (directory / SENTENCE_MODULES).write_text(json.dumps(modules), encoding="utf-8")
    assert "has no recipe" in refusal(directory)
    assert load(directory).prompts.has_chat_template


def test_a_file_of_the_operators_is_a_recipe(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(SHORT_TEMPLATE, encoding="utf-8")
    recipe = load(directory, score_template=str(tmp_path / "t.jinja"), score_labels=("y", "n")).scores.recipe
    assert recipe is not None
    assert recipe.name == "setting"
    expected = "<|im_start|>system\ni<|im_end|><|im_start|>query\nq<|im_end|><|im_start|>document\nd<|im_end|>"
    assert rendered(recipe.pair("q", "d", "i")) == f"{expected}<|im_start|>"


def test_the_directorys_recipe_comes_before_the_operators(directory: Path) -> None:
    add_labels(directory)
    write_reranker_files(directory, {"true_token_id": 70, "false_token_id": 71})
    assert load(directory, score_template="qwen3-reranker").scores.name == "sentence-transformers"


def test_the_operators_recipe_replaces_one_that_cannot_be_used(directory: Path) -> None:
    add_labels(directory)
    write_reranker_files(directory, {"true_token_id": 70, "false_token_id": None})
    model = load(directory, score_template="qwen3-reranker")
    assert model.scores.name == "qwen3-reranker"
    assert not model.prompts.has_chat_template


@pytest.mark.parametrize(
    ("template", "labels", "problem"),
    [
        (None, ("y", "n"), "No such file"),
        ("{{ messages[0].content }}", ("y", "n"), "does not show"),
        ("{% if %}", ("y", "n"), "does not show"),
        (PAIR_TEMPLATE, ("y", "no such token"), "not both tokens"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_at_start(
    directory: Path, tmp_path: Path, template: str | None, labels: tuple[str, str], problem: str
) -> None:
    path = tmp_path / "t.jinja"
    if template is not None:
        path.write_text(template, encoding="utf-8")
    with pytest.raises(ModelDirectoryError, match=rf"--score-template .*t\.jinja: .*{problem}"):
        load(directory, score_template=str(path), score_labels=labels)


@pytest.mark.parametrize(
    "settings",
    [
        {"score_labels": ("y", "n")},
        {"score_template": "qwen3-reranker", "score_labels": ("y", "n")},
        {"score_template": "t.jinja"},
        {"score_template": "t.jinja", "score_labels": ("y",)},
        {"score_template": "t.jinja", "score_labels": ("y", "y")},
        {"score_template": "t.jinja", "score_labels": ("y", "n", "m")},
    ],
)
def test_labels_belong_to_a_template_from_a_file(directory: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="score_labels"):
        TokenizerSettings(model_dir=directory, **settings)
