"""The served model's reply parsers and call grammars."""

from __future__ import annotations

from pathlib import Path

from services.tokenizer.chat.conversation import Conversation
from services.tokenizer.replies import ReplyParser, choose_reply_parser, make_reply_parser
from services.tokenizer.replies.call_grammar import CallRequest, tool_call_grammar
from services.tokenizer.request.prompts import PromptEncoder
from shared.model_dir import CONFIG, read_json

_PLAIN = "none"


class ReplyParsers:
    """Makes the reply parsers and call grammars of one family of models."""

    def __init__(self, name: str, prompts: PromptEncoder) -> None:
        """`name` is one of `REPLY_PARSERS`."""
        self._name = name
        self._prompts = prompts

    def make(
        self, conversation: Conversation, prompt_text: str, *, skips_special_tokens: bool = True
    ) -> ReplyParser | None:
        """A parser for one reply after `prompt_text`; None if replies are plain text."""
        if self._name == _PLAIN:
            return None
        return make_reply_parser(
            self._name,
            tools=conversation.offered_tools,
            prompt_text=prompt_text,
            special_tokens=self._prompts.special_tokens if skips_special_tokens else frozenset(),
        )

    def call_grammar(self, conversation: Conversation, prompt_text: str) -> str:
        """The grammar of a reply that must call one of the `callable_tools`; raises as `tool_call_grammar`."""
        return tool_call_grammar(
            self._name,
            CallRequest(
                conversation.callable_tools,
                bool(conversation.tool_name),
                prompt_text,
                self._prompts.template_text or "",
                self._prompts.added_tokens,
            ),
        )


def load_reply_parsers(model_dir: Path, prompts: PromptEncoder, *, name: str) -> ReplyParsers:
    """The parsers of the family `name`; "auto" picks the model's.

    Raises:
        ModelDirectoryError: the configuration is missing or malformed.
    """
    if name == "auto":
        architectures = read_json(model_dir, CONFIG).get("architectures") or [""]
        name = choose_reply_parser(str(architectures[0]), prompts.template_text)
    return ReplyParsers(name, prompts)
