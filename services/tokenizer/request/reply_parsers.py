"""The served model's reply parsers and call grammars."""

from __future__ import annotations

from services.tokenizer.chat.chat_template import ChatTemplate
from services.tokenizer.chat.conversation import Conversation
from services.tokenizer.replies import ReplyParser, ReplySetting, choose_reply_parser, make_reply_parser
from services.tokenizer.replies.grammars.call_grammars import CALL_GRAMMARS, GrammarRequest
from services.tokenizer.replies.grammars.reply_grammar import ReplyGrammar, reply_grammar
from services.tokenizer.replies.openings import THINK_MARKUP, Opening, opening_inside, opening_of, reasons
from services.tokenizer.request.prompts import PromptEncoder

_PLAIN = "none"
_GENERIC = "generic"


class ReplyParsers:
    """Makes the reply parsers and call grammars of one family of models."""

    def __init__(self, name: str, prompts: PromptEncoder) -> None:
        """`name` is one of `REPLY_PARSERS`."""
        self._name = name
        self._prompts = prompts

    @property
    def has_parser(self) -> bool:
        """Whether replies to conversations are more than text."""
        return self._name != _PLAIN

    @property
    def tool_parser(self) -> str:
        """The name of what finds tool calls; empty if there are none to find."""
        return self._name if self._prompts.takes_tools and self._name in CALL_GRAMMARS else ""

    @property
    def reasoning_parser(self) -> str:
        """The name of what finds reasoning; empty if the model marks none."""
        texts, template = self._prompts.added_tokens, self._prompts.template_text or ""
        return self._name if reasons(self._name, template, texts) else ""

    def opening(self, conversation: Conversation, prompt_text: str) -> Opening:
        """What a reply begins with to a conversation that was rendered like this."""
        if conversation.continues_final:
            return opening_inside(self._name, conversation.messages[-1].content)
        texts, template = self._prompts.added_tokens, self._prompts.template_text or ""
        return opening_of(self._name, prompt_text, template_text=template, token_texts=texts)

    def make(
        self,
        conversation: Conversation,
        opening: Opening,
        *,
        skips_special_tokens: bool = True,
        has_form: bool = False,
        has_grammar: bool = False,
    ) -> ReplyParser | None:
        """A parser for one reply; None if replies are plain text. `has_form` and `has_grammar` as in `ReplySetting`."""
        if not self.has_parser:
            return None
        setting = ReplySetting(
            conversation.offered_tools,
            opening,
            self._prompts.special_tokens if skips_special_tokens else frozenset(),
            has_form=has_form,
            one_call=conversation.one_call,
            has_grammar=has_grammar,
            allowed_names=conversation.allowed_names,
            earlier_ids=conversation.call_ids,
            is_continued=conversation.continues_final,
        )
        return make_reply_parser(self._name, setting)

    def grammar(
        self, conversation: Conversation, opening: Opening, *, has_form: bool = False, begins_at_once: bool = False
    ) -> ReplyGrammar:
        """The grammar of a reply that must call one of the `callable_tools`, or have a form; raises as `reply_grammar`.

        Beside a form, a tool that may be called is an alternative.
        """
        return reply_grammar(
            self._name,
            GrammarRequest(
                conversation.allowed_tools if has_form else conversation.callable_tools,
                conversation.one_call or bool(conversation.tool_name),
                opening,
                self._prompts.template_text or "",
                self._prompts.added_tokens,
                has_form=has_form,
                begins_at_once=begins_at_once,
            ),
        )


def load_reply_parsers(architecture: str, prompts: PromptEncoder, *, name: str) -> ReplyParsers:
    """The parsers of the family `name`; "auto" picks the model's."""
    if name == "auto":
        name = choose_reply_parser(architecture, prompts.template_text)
    return ReplyParsers(name, prompts)


def lacks_tools(architecture: str, template: ChatTemplate) -> bool:
    """Whether a model can only be given generic tools: its template lists none, or its calls are in no known format.

    A family that marks reasoning otherwise than generic replies do stays without.
    """
    name = choose_reply_parser(architecture, template.text)
    markup, generic = THINK_MARKUP.get(name), THINK_MARKUP[_GENERIC]
    reads_reasoning = markup is None or (markup.begin, markup.end) == (generic.begin, generic.end)
    return reads_reasoning and not (template.takes_tools and name in CALL_GRAMMARS)
