"""The messages of Anthropic's Messages, as a chat of the cell has them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.http.anthropic.tools import MessagesTool
from services.tokenizer.http.fields.fields import EchoedFields, Several
from services.tokenizer.http.fields.message_drafts import MessageDraft, MessageDrafts, begins_another
from services.tokenizer.http.openai.chat_messages import ContentPart, Placed, Reply, as_parts, joined, read_parts

_ROLES = {
    "system": tokenizer_pb2.ROLE_SYSTEM,
    "user": tokenizer_pb2.ROLE_USER,
    "assistant": tokenizer_pb2.ROLE_ASSISTANT,
}
# The line by which Claude Code tells Anthropic's servers its version, the first of the system prompt. It changes with
# the conversation, in some releases with each turn: in the prompt, nothing that follows would be found in the cache.
_ATTRIBUTION = re.compile(r"x-anthropic-billing-header:[^\n]*\n?")
# What another provider's servers did in earlier turns, or hid: there is no text of it.
_SKIPPED = frozenset(
    {"redacted_thinking", "server_tool_use", "mcp_tool_use", "container_upload", "fallback", "tool_removal"}
)
_ADDITION, _RESULT = "tool_addition", "tool_result"


class AddedTool(EchoedFields):
    """The tool that an addition names or defines."""

    type: str
    name: str | None = None
    definition: MessagesTool | None = None


class MessagesPart(ContentPart):
    """A part of a message."""

    tool: AddedTool | None = None


MessagesParts = Annotated[
    Several[MessagesPart] | None, BeforeValidator(as_parts, json_schema_input_type=str | list[MessagesPart] | None)
]


class MessagesTurn(EchoedFields):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: MessagesParts = None


class ReadTurns:
    """The messages of a chat, in turns as templates take them: neighbours of one role are one, as in Anthropic's API.

    Attributes:
        drafts: The messages.
        named_tools: Names of tools that the messages refer to.
        added_tools: Tools that the messages define, with the names of their places.
        ignored: Names of parts that have no effect.
    """

    def __init__(self) -> None:
        self.named_tools: set[str] = set()
        self.added_tools: list[tuple[MessagesTool, str]] = []
        self.ignored: list[str] = []
        self.drafts = MessageDrafts("messages")

    def add_system(self, parts: Sequence[ContentPart]) -> None:
        """Begin with the system prompt, without what Claude Code tells Anthropic's servers in it.

        Raises:
            HttpError: a part cannot be in a prompt.
        """
        placed = [(part, f"system[{number}]") for number, part in enumerate(parts)]
        if parts and (text := parts[0].text) is not None and (found := _ATTRIBUTION.match(text)):
            rest = text[found.end() :]
            placed[:1] = [(parts[0].model_copy(update={"text": rest}), "system[0]")] if rest else []
        replies = read_parts(placed, self.ignored).replies
        if text := joined(text for reply in replies for text in reply.texts):
            self._turn(tokenizer_pb2.ROLE_SYSTEM, "system", Reply()).contents.append(text)

    def add_turn(self, turn: MessagesTurn, index: int) -> None:
        """Add the message with this index.

        Raises:
            HttpError: a part cannot be in a prompt, or there are too many messages.
        """
        place = f"messages[{index}]"
        read = read_parts(list(self._readable(turn.content or (), place)), self.ignored)
        for result in read.results:
            contents, call_id = [result.content], result.tool_call_id
            self.drafts.add(MessageDraft(tokenizer_pb2.ROLE_TOOL, place, contents=contents, tool_call_id=call_id))
        for reply in read.replies:
            if any((*reply.texts, *reply.reasonings, *reply.calls)) or not turn.content:
                draft = self._turn(_ROLES[turn.role], place, reply)
                draft.contents.append(joined(reply.texts))
                draft.reasonings.append(joined(reply.reasonings))
                draft.calls += reply.calls

    def _readable(self, parts: Sequence[MessagesPart], place: str) -> Iterator[Placed]:
        """The parts that have text; what the others say of tools is noted."""
        for number, part in enumerate(parts):
            placed = f"{place}.content[{number}]"
            if part.type == _ADDITION and part.tool is not None:
                self._add_tool(part.tool, placed)
            elif part.type in _SKIPPED or (part.type != _RESULT and part.type.endswith(_RESULT)):
                self.ignored.append(placed)
            else:
                self.named_tools |= {inner.tool_name for inner in part.content or () if inner.tool_name}
                yield part, placed

    def _add_tool(self, added: AddedTool, place: str) -> None:
        if added.definition is not None and added.definition.is_own:
            self.added_tools.append((added.definition, f"{place}.tool.definition"))
        elif added.name is not None:
            self.named_tools.add(added.name)
        else:
            self.ignored.append(place)

    def _turn(self, role: tokenizer_pb2.Role, place: str, reply: Reply) -> MessageDraft:
        """The message that a reply of a turn is a part of."""
        last = self.drafts.last
        has_reasoning = any(reply.reasonings)
        if last is None or last.role != role or (has_reasoning and begins_another(last.contents, last.calls)):
            separator = "\n\n" if role == tokenizer_pb2.ROLE_SYSTEM else "\n"
            return self.drafts.add(MessageDraft(role, place, separator))
        return last
