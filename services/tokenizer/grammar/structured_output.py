"""Turns a request's structured output form into a grammar that is known to work.

Every grammar is first tried in another process; a hostile one only costs its own request.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from lockstep.v1 import tokenizer_pb2
from services.tokenizer.grammar.grammar_child import GrammarChild, GrammarRefusedError, Trial, TrialLimits
from services.tokenizer.grammar.grammar_source import DEFAULT_OPTIONS, FormOptions
from services.tokenizer.grammar.shortest_text import MAX_BYTES, too_long
from services.tokenizer.text_size import MAX_CHOICE_TEXTS
from services.tokenizer.trial_limits import wall_clock_s
from shared.errors import InvalidRequestError, NotSupportedError, QueueFullError, Violation
from shared.network.turns import Slots, get_party
from shared.tenants.fair_room import FairRoom

MAX_FORM_BYTES = 512 * 1024

_NUM_CHILDREN = 2
# Trials of one party that may wait; all parties together may have several times as many.
_MAX_WAITING = 256
_MAX_WAITING_OF_ALL = 8 * _MAX_WAITING
_RETRY_DELAY_S = 1.0
_MAX_REMEMBERED = 256
_MAX_REMEMBERED_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class CompiledForm:
    """A form that can be used."""

    grammar: str
    """A `SamplingOptions.grammar`."""
    not_held: tuple[str, ...]
    """The keywords of a schema that the grammar does not hold, as JSON pointers; at most 100."""


class FormCompiler:
    """Compiles forms for one model, on the main thread's event loop.

    Trial processes start on demand, and end with `close` or with this process.
    """

    def __init__(self, model_dir: Path, limits: TrialLimits, *, can_compile: bool = True) -> None:
        """Without `can_compile`, every form is refused."""
        self._model_dir = model_dir
        self._can_compile = can_compile
        self._limits = limits
        self._idle: list[GrammarChild] = []
        self._turns = Slots(_NUM_CHILDREN)
        self._waiting = FairRoom(_MAX_WAITING, capacity=_MAX_WAITING_OF_ALL)
        self._outcomes = _Outcomes()

    async def compile(
        self,
        form: tokenizer_pb2.StructuredOutput,
        *,
        field: str = "structured_output",
        max_bytes: int = MAX_BYTES,
        options: FormOptions = DEFAULT_OPTIONS,
        around: str = "",
        skipped_ids: tuple[int, ...] = (),
    ) -> CompiledForm:
        """Compile a form; results are cached.

        Args:
            form: From the client, unchecked.
            field: Its field in the request.
            max_bytes: The longest text that fits the context.
            options: For forms of JSON.
            around: A grammar that names the form's by `@form`; empty if the form is the whole text.
            skipped_ids: Tokens that the grammar allows first, after which its trial begins.

        Raises:
            InvalidRequestError: the form is empty or too large (`OUT_OF_RANGE`); malformed, beyond what a grammar can
                guarantee, or fits no text (`GRAMMAR_INVALID`); or costs too much, or exceeds `max_bytes`
                (`GRAMMAR_TOO_COMPLEX`).
            NotSupportedError: grammars cannot be compiled for this model.
            QueueFullError: too many grammars are waiting.
        """
        kind, text = _read_form(form, field)
        return await self._compile(Trial(kind, text, options, around, skipped_ids), f"{field}.{kind}", max_bytes)

    async def compile_reply(
        self, grammar: str, *, field: str, max_bytes: int = MAX_BYTES, skipped_ids: tuple[int, ...] = ()
    ) -> CompiledForm:
        """Compile a grammar that this service made for what `field` asks for; otherwise as `compile`."""
        return await self._compile(Trial("reply", grammar, DEFAULT_OPTIONS, "", skipped_ids), field, max_bytes)

    async def _compile(self, trial: Trial, field: str, max_bytes: int) -> CompiledForm:
        if not self._can_compile:
            raise NotSupportedError(f"{field}: grammars cannot be compiled for this model's tokenizer")
        key = hashlib.sha256(repr(trial).encode()).digest()
        outcome = self._outcomes.get(key)
        if outcome is None:
            async with self._turn():
                # Another request with the same form may have finished meanwhile.
                outcome = self._outcomes.get(key) or await self._try(trial)
            if outcome.is_lasting:
                self._outcomes.add(key, outcome)
        if outcome.problem:
            reason = "GRAMMAR_TOO_COMPLEX" if outcome.is_too_complex else "GRAMMAR_INVALID"
            raise _refusal(field, reason, outcome.problem)
        if outcome.shortest_bytes > max_bytes:
            raise _refusal(field, "GRAMMAR_TOO_COMPLEX", too_long(outcome.shortest_bytes, max_bytes))
        return CompiledForm(outcome.grammar, outcome.not_held)

    def close(self) -> None:
        """Kill the idle trial processes; a busy one ends with this process."""
        for child in self._idle:
            child.kill()

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        party = get_party()
        if not self._waiting.has_room(party, 1):
            raise QueueFullError("too many grammars are waiting to be compiled", retry_delay_s=_RETRY_DELAY_S)
        with contextlib.ExitStack() as waiting:
            waiting.enter_context(self._waiting.enter(party))
            async with self._turns:
                waiting.close()
                yield

    async def _try(self, trial: Trial) -> _Outcome:
        child = self._take_idle() or await GrammarChild.start(self._model_dir, self._limits)
        try:
            tried = await child.try_grammar(trial)
            return _Outcome(grammar=tried.source, not_held=tried.not_held, shortest_bytes=tried.shortest_bytes)
        except GrammarRefusedError as error:
            return _Outcome(problem=str(error), is_too_complex=error.is_too_complex)
        except TimeoutError:
            # Not cached: the machine may just be too busy.
            problem = f"it takes more than {wall_clock_s(self._limits.cpu_s):g} s"
            return _Outcome(problem=problem, is_too_complex=True, is_lasting=False)
        finally:
            if child.is_usable:
                self._idle.append(child)
            else:
                # After a cancelled call the process is still busy with the grammar.
                child.kill()

    def _take_idle(self) -> GrammarChild | None:
        while self._idle:
            child = self._idle.pop()
            if child.is_usable:
                return child
            child.kill()
        return None


@dataclass(frozen=True, slots=True)
class _Outcome:
    grammar: str = ""
    not_held: tuple[str, ...] = ()
    shortest_bytes: int = 0
    problem: str = ""
    is_too_complex: bool = False
    is_lasting: bool = True

    @property
    def num_bytes(self) -> int:
        return len(self.grammar) + len(self.problem) + sum(map(len, self.not_held))


class _Outcomes:
    """An LRU cache, bounded by number and size."""

    def __init__(self) -> None:
        self._key_to_outcome: OrderedDict[bytes, _Outcome] = OrderedDict()
        self._num_bytes = 0

    def get(self, key: bytes) -> _Outcome | None:
        outcome = self._key_to_outcome.get(key)
        if outcome is not None:
            self._key_to_outcome.move_to_end(key)
        return outcome

    def add(self, key: bytes, outcome: _Outcome) -> None:
        if key in self._key_to_outcome:
            return
        self._key_to_outcome[key] = outcome
        self._num_bytes += outcome.num_bytes
        while len(self._key_to_outcome) > _MAX_REMEMBERED or self._num_bytes > _MAX_REMEMBERED_BYTES:
            _, oldest = self._key_to_outcome.popitem(last=False)
            self._num_bytes -= oldest.num_bytes


def _read_form(form: tokenizer_pb2.StructuredOutput, field: str) -> tuple[str, str]:
    """The form's kind and text; equal pairs mean equal grammars."""
    kind = form.WhichOneof("form")
    if kind is None:
        raise _refusal(field, "OUT_OF_RANGE", "one of json_schema, regex, grammar, choices and json_object must be set")
    if kind == "json_object":
        if not form.json_object:
            raise _refusal(f"{field}.{kind}", "OUT_OF_RANGE", "must be true if set")
        return kind, ""
    if kind == "choices":
        texts = form.choices.texts
        if not 1 <= len(texts) <= MAX_CHOICE_TEXTS or not all(texts):
            problem = f"must have 1 to {MAX_CHOICE_TEXTS} texts, none of them empty"
            raise _refusal(f"{field}.{kind}", "OUT_OF_RANGE", problem)
        text = json.dumps(list(texts), ensure_ascii=False)
    else:
        text = getattr(form, kind)
        if not text:
            raise _refusal(f"{field}.{kind}", "OUT_OF_RANGE", "must not be empty")
    if len(text.encode()) > MAX_FORM_BYTES:
        raise _refusal(f"{field}.{kind}", "OUT_OF_RANGE", f"must have at most {MAX_FORM_BYTES} bytes")
    return kind, text


def _refusal(field: str, reason: str, description: str) -> InvalidRequestError:
    return InvalidRequestError.from_violations([Violation(field, reason, description)])
