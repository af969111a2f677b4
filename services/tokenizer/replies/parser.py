"""The base of all reply parsers."""

from __future__ import annotations

import abc
import functools
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from services.tokenizer.chat.conversation import FUNCTIONS, Tool
from services.tokenizer.json.json_values import read_json_object
from services.tokenizer.replies.code_spans import CodeSpans
from services.tokenizer.replies.json_reading import read_value
from services.tokenizer.replies.json_repair import JsonRepair
from services.tokenizer.replies.openings import Opening, ThinkMarkup
from services.tokenizer.replies.parts import ReasoningPart, ReplyPart, TextPart, ToolCallPart
from services.tokenizer.replies.reader import SPACE, Reading, TextEndedError, TextReader, UnparsableError
from services.tokenizer.text.markers import NO_MARKERS, Markers

# No tool has a longer name; anything longer is not a name.
MAX_NAME_LENGTH = 256
# A parser holds back at most this many characters of what may turn out to be a call, besides those of one piece. Beyond
# that it is text. Once a call has begun, its arguments are passed on as they arrive; only a value that is written by
# itself and is not text (`untyped_values`) waits for its end.
MAX_HELD_LENGTH = 64 * 1024
# Where calls may begin at the end of reasoning; hostile reasoning may have thousands of such places.
_MAX_TRIED_OPENINGS = 16


@dataclass(frozen=True, slots=True)
class ReplySetting:
    """What a parser needs to know."""

    tools: tuple[Tool, ...] = ()
    """Offered to the model; without any, tool markup is text."""
    opening: Opening = Opening.EITHER
    special_tokens: frozenset[str] = frozenset()
    """Texts of special tokens to leave out of the answer."""
    has_form: bool = False
    """Whether a grammar gives the reply a form: after the reasoning it is calls alone, or text to the end."""
    one_call: bool = False
    """Whether the first call ends the reply."""
    has_grammar: bool = False
    """Whether a grammar writes the reply, so that no tag is missing."""
    allowed_names: frozenset[str] = frozenset()
    """A call of any other tool is text; empty if all that are offered are allowed."""
    earlier_ids: tuple[str, ...] = ()
    """The ids of the conversation's calls so far; empty for one without."""
    is_continued: bool = False
    """Whether the reply goes on within a message's text, so that a line break at its beginning is part of that."""


class _ReplyEndedError(Exception):
    """A call has ended the reply."""


class ReplyParser(abc.ABC):
    """Parses one reply. The joined parts of `feed` and `finish` do not depend on how the text was cut.

    Text is passed on as soon as it cannot be part of markup. If what follows markup is not what it announced, all of it
    is text, markup included but without special tokens; once part of a tool call has been passed on, only what follows
    the last valid character.
    """

    # The markup, which may consist of special tokens.
    markup: ClassVar[frozenset[str]] = frozenset()
    # What begins calls in reasoning, unless it ends the reasoning.
    call_openings: ClassVar[Markers] = NO_MARKERS
    # None for families whose reasoning is marked otherwise, or that have none.
    think_markup: ClassVar[ThinkMarkup | None] = None

    def __init__(self, setting: ReplySetting) -> None:
        self._setting = setting
        self._tools = {tool.name: tool for tool in setting.tools}
        self.is_reasoning = setting.opening is Opening.REASONING
        """Whether the text so far ends inside reasoning."""
        self.was_cut = False
        """Whether the reply was cut off; known at its end."""
        self.is_over = False
        """Whether a call has ended the reply; what follows is ignored."""
        self._filter = _TokenFilter(_dropped_tokens(setting.special_tokens, self.markup))
        # Markup that turns out to be none is text, but its special tokens never are. A form's text has no such tokens.
        kept = frozenset() if setting.has_form else self.markup & setting.special_tokens
        self._text_filter = _TokenFilter(_dropped_tokens(kept, frozenset()))
        self.needs_special_tokens = not self.markup.isdisjoint(setting.special_tokens)
        self._reader = TextReader()
        self._parts: list[ReplyPart] = []
        self._reasoning: list[str] = []
        self._num_calls = 0
        # Ids of the conversation's calls.
        self._ids = set(setting.earlier_ids)
        # The opening of the markup that is being read; empty once a call in it has been passed on.
        self._opening = ""
        self._code = CodeSpans()
        # While arguments are streamed.
        self._repair: JsonRepair | None = None
        self._course = self._read()

    def feed(self, text: str) -> list[ReplyPart]:
        """Take the next piece; returns the parts that have become certain.

        It must contain special tokens if the parser `needs_special_tokens`; those without a meaning are dropped.
        """
        self._advance(self._filter.push(text) if self.needs_special_tokens else text)
        return self._take_parts()

    def finish(self, *, is_cut: bool = False) -> list[ReplyPart]:
        """The reply has ended, or is cut off; returns the parts held back.

        A model may end its reply while it reasons, with a call: that call is made, although it was reasoning before.
        """
        self.was_cut = is_cut
        self._reader.is_complete = True
        self._advance(self._filter.flush())
        self._put_filtered(self._text_filter.flush())
        if self.is_reasoning and not is_cut and self._tools:
            self._parts += self._calls_at_end("".join(self._reasoning))
        return self._take_parts()

    @abc.abstractmethod
    def _read(self) -> Reading[None]:
        """Read the whole reply; returns only when the text has ended."""

    def _read_reply(self, read_markup: Callable[[str], Reading[None]]) -> Reading[None]:
        """Read reasoning in the family's `think_markup`, then text and, where there are tools, calls."""
        assert self.think_markup is not None
        yield from self._read_reasoning(self.think_markup, self._setting.opening)
        yield from self._read_text(self.call_openings if self._tools else NO_MARKERS, read_markup)

    def _read_text(self, openings: Markers, read_markup: Callable[[str], Reading[None]]) -> Reading[None]:
        if self._setting.has_form and not (yield from self._reader.is_at(openings)):
            openings = NO_MARKERS
        while (opening := (yield from self._pass_until(openings, self._put_text))) is not None:
            if self._code.is_in_code(opening):
                self._opening = opening
                self._give_back()
                continue
            yield from self._try(opening, read_markup)
            if self._num_calls and self.think_markup is not None:
                yield from self._read_reasoning(self.think_markup, Opening.EITHER)

    def _try(self, opening: str, read_markup: Callable[[str], Reading[None]]) -> Reading[None]:
        """Read markup whose opening has been read but not accepted."""
        self._opening = opening
        self._reader.max_read = MAX_HELD_LENGTH
        try:
            yield from read_markup(opening)
        except UnparsableError as error:
            if self._repair is not None:
                self._end_arguments(self._repair, is_cut=isinstance(error, TextEndedError))
            self._end_after_call()
            if self._setting.has_form and self.was_cut:
                # The beginning of a call, which is the only other thing than the form.
                self._reader.position = len(self._reader.text)
                self._reader.accept()
            else:
                self._give_back()
        else:
            self._end_after_call()
        finally:
            self._reader.max_read = None

    def _read_reasoning(self, markup: ThinkMarkup, place: Opening) -> Reading[None]:
        begins = ""
        if not (self._setting.has_form and place is Opening.ANSWER):
            begins = yield from self._reader.one_of(markup.begin, "\n" + markup.begin, "\n\n" + markup.begin)
        if not begins and place is not Opening.REASONING:
            return
        self.is_reasoning = True
        if begins or not self._setting.is_continued:
            yield from self._reader.skip("\n")
        if (yield from self._pass_until(_ends_of(markup), self._put_reasoning)) is None:
            return
        self.is_reasoning = False
        if self._setting.has_form:
            yield from self._reader.one_of(markup.separator)
        else:
            yield from self._reader.skip("\n")

    def _pass_until(self, markers: Markers, put: Callable[[str], None]) -> Reading[str | None]:
        """Pass text on up to a marker, which is read but not accepted; None at the end of the text."""
        reader = self._reader
        reader.mark = reader.position
        while True:
            match = markers.find(reader.text, reader.position)
            held = 0 if match or reader.is_complete else markers.held_length(reader.text, reader.position)
            reader.position = match.start() if match else len(reader.text) - held
            if passed := reader.accept():
                put(passed)
            if match:
                reader.position = match.end()
                return match[0]
            if not (yield from reader.wait()):
                return None

    def _begin_call(self, name: str, call_id: str = "") -> None:
        """Pass a call's name on, and accept what has been read. It gets an id, unless the model's can come back."""
        name, allowed = self._offered_name(name), self._setting.allowed_names
        if allowed and name not in allowed:
            raise UnparsableError
        self._end_after_call()
        if not 0 < len(call_id.encode()) <= MAX_NAME_LENGTH:
            call_id = f"call_{secrets.token_hex(12)}"
        self._ids.add(call_id)
        self._parts.append(ToolCallPart(self._num_calls, call_id, name, ""))
        self._num_calls += 1
        self._opening = ""
        self._code = CodeSpans()
        self._reader.accept()

    def _offered_name(self, written: str) -> str:
        """The tool that a name means, which may have Kimi's and gpt-oss's prefix, even twice.

        Raises:
            UnparsableError: no such tool is offered.
        """
        name = written.strip()
        while name not in self._tools:
            if not name.startswith(FUNCTIONS):
                raise UnparsableError
            name = name.removeprefix(FUNCTIONS)
        return name

    def _end_after_call(self) -> None:
        """End the reply, if it has its only call."""
        if self._setting.one_call and self._num_calls:
            raise _ReplyEndedError

    def _skip_after_call(self, characters: str) -> Reading[None]:
        """Skip any of `characters` after a whole call."""
        self._end_after_call()
        yield from self._reader.skip(characters)

    def _read_arguments(self) -> Reading[None]:
        self._repair = repair = JsonRepair()
        self._reader.max_read = None
        yield from read_value(self._reader)
        self._end_arguments(repair, is_cut=False)
        self._reader.max_read = MAX_HELD_LENGTH

    def _end_arguments(self, repair: JsonRepair, *, is_cut: bool) -> None:
        """The arguments end with what has been read or, if cut off, with the text."""
        if is_cut:
            self._reader.position = len(self._reader.text)
        self._put_arguments(repair.push(self._reader.accept()) + repair.finish())
        self._repair = None

    def _close(self, *closings: str, around: Markers = NO_MARKERS) -> Reading[str]:
        """Read one of `closings`, or find one of `around`, which stays to be read: a model omits what closes.

        Empty if the text ends first.
        """
        try:
            yield from self._reader.skip(SPACE)
            if outer := (yield from self._reader.next_of(around)):
                return outer
            return (yield from self._reader.expect(*closings))
        except TextEndedError:
            self._reader.position = len(self._reader.text)
            return ""

    def _give_back(self) -> None:
        """It was not markup: its opening is text, and what follows is read again."""
        self._reader.rewind()
        self._reader.position += len(self._opening)
        self._put_text(self._reader.accept())

    def _put_arguments(self, text: str) -> None:
        match self._parts:
            case [*_, ToolCallPart(index, call_id, name, arguments)]:
                self._parts[-1] = ToolCallPart(index, call_id, name, arguments + text)
            case _ if text:
                self._parts.append(ToolCallPart(self._num_calls - 1, "", "", text))

    def _calls_at_end(self, reasoning: str) -> list[ReplyPart]:
        """The whole calls that reasoning ends with."""
        openings = list(self.call_openings.pattern.finditer(reasoning))
        calls: list[ReplyPart] = []
        # The last one may be inside an argument.
        for opening in reversed(openings[-_MAX_TRIED_OPENINGS:]):
            parts = self._only_calls(reasoning[opening.start() :])
            if calls and not parts:
                break
            calls = parts or calls
        if self._setting.one_call:
            calls = [part for part in calls if isinstance(part, ToolCallPart) and part.index == self._num_calls]
        return calls

    def _only_calls(self, text: str) -> list[ReplyPart]:
        """The calls that a text consists of; empty if there is anything else."""
        inner = type(self)(replace(self._setting, opening=Opening.ANSWER, special_tokens=frozenset(), one_call=False))
        inner._num_calls, inner._ids = self._num_calls, set(self._ids)
        parts = [*inner.feed(text), *inner.finish(is_cut=True)]
        return parts if all(isinstance(part, ToolCallPart) for part in parts) and _are_whole(parts) else []

    def _put_text(self, text: str) -> None:
        self._code.push(text)
        self._put_filtered(self._text_filter.push(text))

    def _put_filtered(self, text: str) -> None:
        match self._parts:
            case [*_, TextPart(before)]:
                self._parts[-1] = TextPart(before + text)
            case _ if text:
                self._parts.append(TextPart(text))

    def _put_reasoning(self, text: str) -> None:
        if self._tools:
            self._reasoning.append(text)
        match self._parts:
            case [*_, ReasoningPart(before)]:
                self._parts[-1] = ReasoningPart(before + text)
            case _ if text:
                self._parts.append(ReasoningPart(text))

    def _advance(self, text: str) -> None:
        if self.is_over:
            return
        self._reader.add(text)
        try:
            next(self._course, None)
        except _ReplyEndedError:
            self.is_over = True
        if self._repair is not None:
            self._put_arguments(self._repair.push(self._reader.accept()))

    def _take_parts(self) -> list[ReplyPart]:
        parts, self._parts = self._parts, []
        return parts


def _are_whole(calls: Sequence[ReplyPart]) -> bool:
    """Whether the arguments of each call are complete."""
    arguments: dict[int, str] = {}
    for part in calls:
        if isinstance(part, ToolCallPart):
            arguments[part.index] = arguments.get(part.index, "") + part.arguments
    try:
        for text in arguments.values():
            read_json_object(text)
    except ValueError:
        return False
    return True


class _TokenFilter:
    """Removes tokens from text that arrives in pieces."""

    def __init__(self, tokens: Markers) -> None:
        self._tokens = tokens
        self._held = ""

    def push(self, text: str) -> str:
        text = self._held + text
        kept = []
        start = 0
        while match := self._tokens.find(text, start):
            kept.append(text[start : match.start()])
            start = match.end()
        end = len(text) - self._tokens.held_length(text, start)
        self._held = text[end:]
        return "".join([*kept, text[start:end]])

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


@functools.cache
def _ends_of(markup: ThinkMarkup) -> Markers:
    return Markers(markup.end, "\n" + markup.end)


@functools.lru_cache(maxsize=16)
def _dropped_tokens(special_tokens: frozenset[str], markup: frozenset[str]) -> Markers:
    """Built once per model."""
    return Markers(*(special_tokens - markup))
