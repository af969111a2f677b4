"""A query and a document before they are rendered. Imports no templates: processes that read bodies have none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.tokenizer.chat.conversation import Conversation

if TYPE_CHECKING:
    from services.tokenizer.chat.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True)
class ScorePair:
    """A query and a document, and the template that makes their prompt."""

    template: ChatTemplate
    conversation: Conversation
