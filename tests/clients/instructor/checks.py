"""What instructor makes of answers, by three of its ways to ask for an object."""

from __future__ import annotations

from typing import Any

import instructor
import openai
from pydantic import BaseModel

MESSAGES = [{"role": "user", "content": "Extract: Jason is 25 years old."}]


class User(BaseModel):
    """A user, as in the first sample of instructor's documentation."""

    name: str
    age: int


class AnyUser(BaseModel):
    """A user of whom nothing may be known."""

    name: Any = None
    age: Any = None


def extract(cell: Any, mode: Any, kind: type[BaseModel], **settings: Any) -> Any:
    """Ask for an object, once."""
    client = instructor.from_openai(openai.OpenAI(base_url=cell.base_url, api_key="none", max_retries=0), mode=mode)
    return client.create(model=cell.model, response_model=kind, max_retries=1, messages=MESSAGES, **settings)


def check_tools(demo: Any) -> None:
    """The function that is named is called, and the call ends where its object does."""
    user = extract(demo, instructor.Mode.TOOLS, User, max_tokens=80)
    assert isinstance(user, User)


def check_json(demo: Any) -> None:
    """A form without a schema, which the prompt has: the model is bound to an object, not to its keys."""
    user = extract(demo, instructor.Mode.JSON, AnyUser, max_tokens=400)
    assert isinstance(user, AnyUser)


def check_responses_tools(demo: Any) -> None:
    """By Responses, with a form beside the function that is named: the call wins."""
    user = extract(demo, instructor.Mode.RESPONSES_TOOLS, User, max_output_tokens=80)
    assert isinstance(user, User)
