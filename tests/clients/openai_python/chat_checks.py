"""Chats with OpenAI's library for Python."""

from __future__ import annotations

from typing import Any

import openai


def check_chat(cell: Any) -> None:
    """A chat is answered by the model that was asked."""
    client = openai.OpenAI(base_url=cell.base_url, api_key="none", max_retries=0)
    answer = client.chat.completions.create(
        model=cell.model, messages=[{"role": "user", "content": "Hi"}], max_completion_tokens=8
    )
    assert answer.choices[0].message.content
    assert answer.model == cell.model
