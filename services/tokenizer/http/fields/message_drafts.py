"""Messages of the cell while the parts of a request that they consist of are read, one after another.

A text grows by parts in a list, and is joined once. To join it with every part would copy it as often, and a message of
protobuf keeps each copy for as long as it lives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.chat.chat_request import MAX_MESSAGES
from services.tokenizer.http.refusals import invalid_field


def begins_another(texts: Sequence[str], calls: Sequence[tokenizer_pb2.ToolCall]) -> bool:
    """Whether reasoning after these is another message's: templates show a message's reasoning before its text."""
    return any(texts) and not calls


@dataclass(slots=True)
class MessageDraft:
    """A message, of which more may come."""

    role: tokenizer_pb2.Role
    place: str
    """Where it begins in the request."""
    separator: str = "\n"
    """What is between its texts."""
    contents: list[str] = field(default_factory=list)
    reasonings: list[str] = field(default_factory=list)
    calls: list[tokenizer_pb2.ToolCall] = field(default_factory=list)
    tool_call_id: str = ""
    name: str = ""

    def message(self) -> tokenizer_pb2.ChatMessage:
        """The message, once all of it is read."""
        return tokenizer_pb2.ChatMessage(
            role=self.role,
            content=self._joined(self.contents),
            reasoning=self._joined(self.reasonings),
            tool_calls=self.calls,
            tool_call_id=self.tool_call_id,
            name=self.name,
        )

    def _joined(self, texts: list[str]) -> str:
        return self.separator.join(filter(None, texts))


class MessageDrafts:
    """The messages of a chat, in order. One too many is refused before it is read: it would take a kilobyte."""

    def __init__(self, field_name: str) -> None:
        """None yet; `field_name` is where they are in the request."""
        self._field_name = field_name
        self._drafts: list[MessageDraft] = []

    def __len__(self) -> int:
        return len(self._drafts)

    @property
    def last(self) -> MessageDraft | None:
        """The last one, if there is any."""
        return self._drafts[-1] if self._drafts else None

    @property
    def messages(self) -> Iterator[tokenizer_pb2.ChatMessage]:
        """The messages, each made when it is taken: a list of them would be the request's text once more."""
        return (draft.message() for draft in self._drafts)

    @property
    def places(self) -> list[str]:
        """Where each message begins in the request."""
        return [draft.place for draft in self._drafts]

    def add(self, draft: MessageDraft) -> MessageDraft:
        """Add a message; returns it.

        Raises:
            HttpError: a chat has fewer.
        """
        if len(self._drafts) == MAX_MESSAGES:
            raise invalid_field(self._field_name, f"must have 1 to {MAX_MESSAGES} messages")
        self._drafts.append(draft)
        return draft
