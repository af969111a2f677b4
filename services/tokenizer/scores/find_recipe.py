"""Finds the recipe of the served model: in its directory, in the settings, or among those that are known by name.

Nothing is guessed: a model without a recipe rates no pairs, and the chat template of a chat model is not one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from services.tokenizer.chat.chat_template import ChatTemplate
from services.tokenizer.chat.template_renderer import Renderer
from services.tokenizer.chat.template_rendering import RenderError
from services.tokenizer.json.json_values import JsonObject
from services.tokenizer.scores.known_recipes import KNOWN_RECIPES
from services.tokenizer.scores.recipe import DOCUMENT, QUERY, SYSTEM, ScoreRecipe, Scores
from services.tokenizer.text.model_tokenizer import ModelTokenizer
from shared.errors import ServiceError
from shared.model_files.model_dir import (
    CONFIG,
    SENTENCE_CONFIG,
    SENTENCE_MODEL_CONFIG,
    ModelDirectoryError,
    read_json,
    read_json_if_any,
)
from shared.model_files.sentence_files import module_directory, module_kind, read_modules

logger = logging.getLogger(__name__)

_NO_RECIPE = (
    "the model has no recipe that makes a prompt of a query and a document: neither sentence-transformers' files with "
    "a LogitScore, nor --score-template, nor a name that is known; send prompts with label_token_ids"
)
_ONE_LABEL = "the model's recipe rates by the raw logit of one label, which is not returned: two labels are needed"
_NOT_SHOWN = "does not show a query and a document, by messages with the roles `query` and `document`"
# What sentence-transformers gives to the tokenizer, or keeps for itself, instead of the template.
_NOT_VARIABLES = ("add_generation_prompt", "restore_suffix", "padding", "truncation", "max_length", "return_tensors")
# No text that a template is likely to have.
_MARKS = {SYSTEM: "qzinstructionzq", QUERY: "qzqueryzq", DOCUMENT: "qzdocumentzq"}
_USER = "qzuserzq"


class _NoRecipeError(Exception):
    """What is found is no recipe; the message is for the client."""


@dataclass(frozen=True, slots=True)
class _Scorer:
    """What a directory's `modules.json` says of scores."""

    first: int
    second: int | None
    """None for a scorer with one label."""
    other_modules: set[str]
    """The kinds of modules that compute something else."""


class RecipeFinder:
    """Looks for the recipe of one model, and tries its template."""

    def __init__(
        self,
        model_dir: Path,
        name: str,
        tokenizer: ModelTokenizer,
        *,
        setting: str | None,
        labels: Sequence[str],
        make_renderer: Callable[[str], Renderer],
    ) -> None:
        """Look for none yet.

        Args:
            model_dir: The model's directory.
            name: The model's name.
            tokenizer: Its tokenizer.
            setting: `--score-template`.
            labels: `--score-labels`.
            make_renderer: Makes what renders a template.
        """
        self._model_dir = model_dir
        self._name = name
        self._tokenizer = tokenizer
        self._setting = setting
        self._setting_labels = labels
        self._make_renderer = make_renderer

    def find(self) -> Scores:
        """What the model rates pairs by.

        Raises:
            ModelDirectoryError: a file of the recipe is malformed, or the settings' template cannot be used.
        """
        given = self._setting
        owns_template, problem = False, ""
        try:
            if (scorer := _read_scorer(self._model_dir)) is not None:
                owns_template = self._owns_template()
                recipe = self._from_directory(scorer)
                if given is not None:
                    logger.warning("--score-template has no effect: the model's directory has a recipe of its own")
                return Scores(recipe, owns_template=owns_template)
        except _NoRecipeError as error:
            problem = str(error)
        try:
            if given is not None:
                return Scores(self._from_setting(given), owns_template=owns_template)
            if not problem and (name := self._known_name()) is not None:
                return Scores(self._known(name))
        except _NoRecipeError as error:
            if given is not None:
                raise ModelDirectoryError(f"--score-template {given}: {error}") from error
            problem = str(error)
        return Scores(None, problem or _NO_RECIPE, owns_template=owns_template)

    def _from_directory(self, scorer: _Scorer) -> ScoreRecipe:
        """The recipe in sentence-transformers' files.

        Source: sentence-transformers 6.2, `LogitScore` in cross_encoder/modules/logit_score.py.
        """
        if scorer.other_modules:
            others = ", ".join(sorted(scorer.other_modules))
            raise _NoRecipeError(f"the model's recipe has modules that are not known: {others}")
        if scorer.second is None:
            raise _NoRecipeError(_ONE_LABEL)
        labels = scorer.first, scorer.second
        if any(self._tokenizer.backend.id_to_token(label) is None for label in labels):
            raise _NoRecipeError("the labels of the model's LogitScore are not both tokens of its tokenizer")
        template = self._tokenizer.templates.get("default")
        if template is None:
            raise _NoRecipeError("the model's directory has a LogitScore, and no chat template to make prompts by")
        variables = _template_variables(self._model_dir)
        return self._try(
            "sentence-transformers",
            template,
            labels,
            instruction=_default_prompt(self._model_dir),
            opens_turn=bool(variables.pop("add_generation_prompt", False)),
            variables={key: value for key, value in variables.items() if key not in _NOT_VARIABLES},
        )

    def _from_setting(self, given: str) -> ScoreRecipe:
        if given in KNOWN_RECIPES:
            return self._known(given)
        try:
            source = Path(given).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise _NoRecipeError(str(error)) from error
        return self._try("setting", source, self._labels(self._setting_labels))

    def _known_name(self) -> str | None:
        return next((key for key, recipe in KNOWN_RECIPES.items() if recipe.names.fullmatch(self._name)), None)

    def _known(self, name: str) -> ScoreRecipe:
        known = KNOWN_RECIPES[name]
        return self._try(name, known.template, self._labels(known.labels))

    def _labels(self, texts: Sequence[str]) -> tuple[int, int]:
        first, second = (self._tokenizer.backend.token_to_id(text) for text in texts)
        if first is None or second is None:
            raise _NoRecipeError(f"its labels {' and '.join(texts)} are not both tokens of the model")
        return first, second

    def _try(
        self,
        name: str,
        source: str,
        labels: tuple[int, int],
        *,
        instruction: str = "",
        opens_turn: bool = False,
        variables: JsonObject | None = None,
    ) -> ScoreRecipe:
        """The recipe, whose template has rendered a pair.

        Raises:
            _NoRecipeError: the template fails on it, or leaves something out.
        """
        renderer, variables = self._make_renderer(source), variables or {}
        try:
            told = _render(renderer, source, _MARKS, variables, opens_turn=opens_turn)
            untold = _render(renderer, source, {**_MARKS, SYSTEM: ""}, variables, opens_turn=opens_turn)
        except _NoRecipeError:
            renderer.close()
            raise
        if not all(_MARKS[role] in text for role in (QUERY, DOCUMENT) for text in (told, untold)):
            renderer.close()
            raise _NoRecipeError(f"the template {_NOT_SHOWN}")
        return ScoreRecipe(
            name,
            ChatTemplate(source, renderer),
            labels,
            instruction,
            takes_instruction=_MARKS[SYSTEM] in told,
            opens_turn=opens_turn,
            variables=variables,
        )

    def _owns_template(self) -> bool:
        source = self._tokenizer.templates.get("default")
        if source is None:
            return False
        renderer = self._make_renderer(source)
        try:
            return _USER not in _render(renderer, source, {"user": _USER}, {}, opens_turn=True)
        except _NoRecipeError:
            return True
        finally:
            renderer.close()


def _render(
    renderer: Renderer, source: str, contents: Mapping[str, str], variables: JsonObject, *, opens_turn: bool
) -> str:
    messages: list[Any] = [{"role": role, "content": content} for role, content in contents.items() if content]
    fields: JsonObject = {**variables, "messages": messages, "tools": None}
    try:
        return renderer.render(source, fields, opens_turn=opens_turn)
    except (RenderError, ServiceError) as error:
        raise _NoRecipeError(f"the template {_NOT_SHOWN}: {error}") from None


def _read_scorer(model_dir: Path) -> _Scorer | None:
    """A directory's LogitScore; None if it has none.

    Raises:
        ModelDirectoryError: a file is malformed.
    """
    modules = read_modules(model_dir)
    scorer = next((module for module in modules if module_kind(module) == "LogitScore"), None)
    if scorer is None:
        return None
    directory = module_directory(model_dir, scorer)
    labels = read_json(directory, CONFIG)
    first, second = labels.get("true_token_id"), labels.get("false_token_id")
    if not _is_token(first) or not (second is None or _is_token(second)) or first == second:
        raise ModelDirectoryError(f"{directory / CONFIG}: its labels are {first!r} and {second!r}")
    return _Scorer(first, second, {module_kind(module) for module in modules} - {"LogitScore", "Transformer"})


def _is_token(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 2**31


def _default_prompt(model_dir: Path) -> str:
    config = read_json_if_any(model_dir, SENTENCE_MODEL_CONFIG)
    prompts, name = config.get("prompts"), config.get("default_prompt_name")
    prompt = prompts.get(name) if isinstance(prompts, dict) and isinstance(name, str) else None
    return prompt if isinstance(prompt, str) else ""


def _template_variables(model_dir: Path) -> dict[str, Any]:
    kwargs = read_json_if_any(model_dir, SENTENCE_CONFIG).get("processing_kwargs")
    variables = kwargs.get("chat_template") if isinstance(kwargs, dict) else None
    return dict(variables) if isinstance(variables, dict) else {}
