"""Published chat templates, which llama.cpp's source archive has: what all doors write renders alike by each."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from shared.model_files.model_dir import ModelDirectoryError
from tests.support.tokenizer.same_prompt import OPTIONS, Turn, check, conversations, load
from tests.support.writers.llama_cpp import published_templates

pytestmark = pytest.mark.writers

# Templates that render no message without tools, or without functions in a form of their own.
REFUSED = {
    "CohereForAI-c4ai-command-r-plus-tool_use",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "fireworks-ai-llama-3-firefunction-v2",
}
# Templates in which what is said before a call is reasoning, that they leave out after the final answer.
FORGETFUL = {"openai-gpt-oss-120b"}


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    """The templates, by the names of their files."""
    return {path.stem: path.read_text() for path in published_templates()}


def test_every_door_has_the_same_prompt_by_a_published_template(sources: dict[str, str]) -> None:
    refused = set()
    for name, source in sources.items():
        try:
            template = load(source)
        except ModelDirectoryError:
            refused.add(name)
            continue

        @settings(max_examples=20, deadline=None)
        @given(conversations(), OPTIONS)
        def run(conversation: tuple[list[str], list[Turn]], options: dict[str, Any]) -> None:
            check(template, conversation, keeps_text=name not in FORGETFUL, **options)  # noqa: B023 - it runs at once

        run()
    assert refused == REFUSED
