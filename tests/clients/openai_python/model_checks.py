"""Models with OpenAI's library for Python."""

from __future__ import annotations

from typing import Any

import openai

from tests.clients.openai_python.asking import connect, error_of


def check_list(cell: Any) -> None:
    """The model is listed by its names, with the length of its context."""
    models = list(connect(cell).models.list())
    assert [model.id for model in models] == [cell.model, cell.other_name]
    assert {(model.object, model.max_model_len) for model in models} == {("model", 8192)}


def check_retrieve(cell: Any) -> None:
    """A model is described by its name; another one is not found."""
    models = connect(cell).models
    assert models.retrieve(cell.model).id == cell.model
    assert error_of(openai.NotFoundError, lambda: models.retrieve("other/model")).code == "model_not_found"
