"""Tool calls as a JSON object with name and arguments."""

from __future__ import annotations

from dataclasses import dataclass

from services.tokenizer.replies.calls.written_arguments import FENCE, CallParser, string_of
from services.tokenizer.replies.json_reading import read_object, read_string, read_value
from services.tokenizer.replies.reader import SPACE, Reading, TextEndedError, UnparsableError
from services.tokenizer.text.markers import NO_MARKERS, Markers

# Further members that a call may have when only its form distinguishes it from other JSON.
_OTHER_MEMBERS = ("type", "id")
# What is between several calls, and sometimes after the last one.
_SEPARATORS = SPACE + ",;"
_MEMBER_ENDS = Markers(",", "}")


@dataclass(slots=True)
class _JsonCall:
    is_bare: bool
    name: str | None = None
    arguments: str | None = None
    has_begun: bool = False
    is_whole: bool = False
    """Whether its arguments are."""


class JsonCallParser(CallParser):
    """Members may come in any order; arguments stream if the name comes first."""

    def _read_marked_calls(self, *closings: str) -> Reading[bool]:
        """Read calls as JSON and one of `closings` after them, if JSON or a code fence comes next; whether it does."""
        yield from self._reader.skip(SPACE)
        if (yield from self._reader.peek()) not in ("{", "[", FENCE[0]):
            return False
        yield from self._read_json_calls(is_bare=False, has_closing=True)
        yield from self._reader.skip(_SEPARATORS)
        yield from self._close(*closings, around=self.call_openings)
        yield from self._skip_after_call("\n")
        return True

    def _read_json_calls(self, *, is_bare: bool, has_closing: bool = False) -> Reading[None]:
        """Read a call, several, or a list of them, in a code fence or not.

        Calls that are `is_bare`, since no markup sets them apart, have no other members than calls have. With
        `has_closing`, markup after them belongs to the last one.

        Raises:
            TextEndedError, UnparsableError: there is none.
        """
        reader = self._reader
        is_fenced = yield from self._skip_fence()
        yield from reader.skip(SPACE)
        is_list = bool((yield from reader.one_of("[")))
        yield from reader.skip(SPACE)
        while True:
            yield from self._read_json_call(is_bare=is_bare, is_last=not (is_list or is_fenced or has_closing))
            yield from reader.skip(_SEPARATORS)
            if (yield from reader.peek()) != "{":
                break
        reader.rewind()
        if is_list:
            yield from reader.skip(_SEPARATORS)
            if not (yield from reader.one_of("]")):
                reader.rewind()
            reader.accept()
        if is_fenced:
            yield from self._end_fence(is_fenced)
            reader.accept()

    def _read_json_call(self, *, is_bare: bool, is_last: bool) -> Reading[None]:
        """With `is_last`, the reply is over where this may be its only call."""
        call = _JsonCall(is_bare)
        try:
            yield from read_object(self._reader, lambda name: self._read_member(string_of(name), call))
        except TextEndedError:
            # The reply has ended without the call's last brace.
            if self.was_cut or not call.is_whole:
                raise
        except UnparsableError:
            # The brace is missing before the markup that ends the call.
            if not (call.has_begun and call.is_whole):
                raise
        if not call.has_begun:
            if call.name is None:
                raise UnparsableError
            self._begin_call(call.name)
            self._put_arguments(call.arguments or "{}")
        self._reader.accept()
        if is_last:
            self._end_after_call()
        yield from self._skip_brace(NO_MARKERS)
        self._reader.accept()

    def _read_member(self, member: str, call: _JsonCall) -> Reading[None]:
        if member == "name" and call.name is None:
            call.name = self._offered_name(string_of((yield from read_string(self._reader))))
        elif member in ("arguments", "parameters") and call.arguments is None:
            yield from self._read_call_arguments(call)
        elif call.is_bare and member not in _OTHER_MEMBERS:
            raise UnparsableError
        else:
            yield from read_value(self._reader)

    def _read_call_arguments(self, call: _JsonCall) -> Reading[None]:
        name = call.name

        def begin() -> None:
            assert name is not None
            self._begin_call(name)
            call.has_begun, call.arguments = True, ""

        arguments = yield from self._read_object(_MEMBER_ENDS, None if name is None else begin)
        call.is_whole = name is not None
        if arguments is not None:
            call.arguments = arguments
