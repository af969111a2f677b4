"""Tries grammars in a separate process, where an endless loop or a memory hog does no harm.

Run as a module, it is that process: it answers each line of stdin with one on stdout, both JSON. The kernel kills it
with its parent, or when a grammar exceeds its limits.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from services.tokenizer.grammar.grammar_source import (
    DEFAULT_OPTIONS,
    FormOptions,
    GrammarSource,
    grammar_around,
    grammar_source,
    place_of_schema_problem,
)
from services.tokenizer.grammar.shortest_text import shortest_text
from services.tokenizer.json.json_schema import SchemaError
from services.tokenizer.refusal_text import without_quotes
from services.tokenizer.trial_limits import limit_cpu
from shared.model_files.model_dir import eos_token_ids, vocabulary_size
from shared.process.parent import make_end_with_parent
from shared.request.grammar import GrammarError, GrammarLibrary, check_matcher
from shared.request.sampling_params import MAX_GRAMMAR_BYTES

_MAX_MESSAGE_LENGTH = 500
# A grammar may be cheap to compile and expensive to follow. Only tokens that could have been others count, since what
# costs may come after a long literal.
_NUM_CHOICES = 256
# Where a text has one continuation, the allowed tokens are its beginnings: there are not more.
_MAX_BEGINNINGS = 64
# A text may repeat a literal without end.
_MAX_FORCED = 4096
# Characters that close something in most notations: randomly drawn tokens would never leave the first string.
_CLOSERS = '"}])>;,:.\n 0'
_NICENESS = 5

# The library's wording when a limit is reached.
_LIMIT_MESSAGE = re.compile(r"\b(too (big|large|many|much|deep|complex)|max is|limit|recursion)")

# Where in the source the library has found an error.
_POSITION = re.compile(r"(?:at )?(\d+)\((\d+)\): (?:failed to compile JSON schema: )?")

# More are not worth their size in an answer.
_MAX_NOT_HELD = 100

Mask = npt.NDArray[np.bool_]


class GrammarTrial:
    """Compiles grammars, and follows each one for some tokens."""

    def __init__(self, library: GrammarLibrary) -> None:
        self._library = library
        tokens = map(library.tokenizer.greedy_tokenize, _CLOSERS)
        closers = [token_ids[0] for token_ids in tokens if len(token_ids) == 1]
        self._closers = np.array([token_id for token_id in closers if token_id < library.num_tokens], np.int64)
        self._eos_token_ids = library.tokenizer.eos_tokens
        sizes = [len(library.tokenizer.decode_bytes([token_id])) for token_id in range(library.tokenizer.vocab_size)]
        self._lengths = np.array(sizes[: library.num_tokens] + [0] * (library.num_tokens - len(sizes)))

    def run(
        self,
        kind: str,
        text: str,
        options: FormOptions = DEFAULT_OPTIONS,
        *,
        around: str = "",
        skipped_ids: Sequence[int] = (),
    ) -> GrammarSource:
        """Translate a form, compile and follow the grammar.

        Args:
            kind, text, options: As `grammar_source` takes them.
            around, skipped_ids: See `grammar_child.Trial`.

        Raises:
            GrammarError: it is malformed, costs too much, or no text fits it.
        """
        try:
            grammar = grammar_source(kind, text, options)
        except RecursionError:
            raise GrammarError("too deeply nested") from None
        try:
            matcher = self._library.compile(grammar.text)
        except GrammarError as error:
            raise _explained(error, kind, text, options) from None
        if around:
            grammar = replace(grammar, text=grammar_around(grammar.text, around))
            matcher = self._library.compile(grammar.text)
        if len(grammar.text.encode()) > MAX_GRAMMAR_BYTES:
            raise GrammarError(f"too large: at most {MAX_GRAMMAR_BYTES} bytes in the library's form")
        matcher.consume_tokens(list(skipped_ids))
        check_matcher(matcher)
        self._follow(matcher)
        return grammar

    def _follow(self, grammar: LLMatcher) -> None:
        """Generate texts in four ways: repeating a token while it can be, at random, preferring what closes things, and
        of the longest tokens, which soon leave a string of some least length.

        The seed is fixed, so the verdict is always the same.
        """
        random = np.random.default_rng(0)

        def any_of(allowed: Mask) -> int:
            return int(random.choice(np.flatnonzero(allowed)))

        def again(allowed: Mask) -> int:
            return last if allowed[last] else any_of(allowed)

        def longest(allowed: Mask) -> int:
            return int(np.argmax(np.where(allowed, self._lengths, -1)))

        def closer(allowed: Mask) -> int:
            closers = self._closers[allowed[self._closers]]
            return int(random.choice(closers)) if len(closers) and random.random() < 0.5 else any_of(allowed)

        begun, _ = self._step_over(grammar)
        for choose in (again, any_of, closer, longest):
            matcher, last, num_forced = begun.deep_copy(), 0, 0
            for _ in range(_NUM_CHOICES):
                allowed = self._allowed(matcher)
                if not allowed.any():
                    matcher = begun.deep_copy()
                    continue
                last = choose(allowed)
                matcher.consume_token(last)
                if num_forced < _MAX_FORCED:
                    matcher, num_tokens = self._step_over(matcher)
                    num_forced += num_tokens

    def _step_over(self, matcher: LLMatcher) -> tuple[LLMatcher, int]:
        """A matcher after the text that must come next, which may be `matcher` itself, advanced; and its tokens."""
        num_tokens = 0
        while num_tokens < _MAX_FORCED:
            token_ids = np.flatnonzero(self._allowed(matcher))
            if not 0 < len(token_ids) <= _MAX_BEGINNINGS:
                break
            ahead = matcher.deep_copy()
            # Half a character cannot be tokenized; the next token completes it.
            text = ahead.compute_ff_bytes().decode(errors="ignore")
            forced = self._library.tokenizer.greedy_tokenize(text)
            if not forced and len(token_ids) == 1:
                # A token that the grammar names.
                forced = [int(token_ids[0])]
            num_consumed = ahead.try_consume_tokens(forced)
            check_matcher(ahead)
            if not 0 < num_consumed == len(forced):
                break
            matcher = ahead
            num_tokens += num_consumed
        return matcher, num_tokens

    def _allowed(self, matcher: LLMatcher) -> Mask:
        """The tokens that may come next, without EOS; none when the text is complete."""
        allowed = self._library.allowed_tokens(matcher)
        check_matcher(matcher)
        if not allowed.any():
            raise GrammarError("no text fits")
        allowed[self._eos_token_ids] = False
        return allowed


def _explained(error: GrammarError, kind: str, text: str, options: FormOptions) -> GrammarError:
    """The library's error, with the place of a client's own text and without that in ours."""
    position = _POSITION.match(str(error))
    problem = str(error)[position.end() if position else 0 :]
    if kind == "json_schema":
        return SchemaError(problem, place_of_schema_problem(text, options))
    if kind == "grammar" and position:
        return GrammarError(f"line {position[1]}, column {position[2]}: {problem}")
    return GrammarError(problem)


def main() -> int:
    """Entry point of the trial process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--memory-bytes", type=int, required=True)
    parser.add_argument("--cpu-s", type=float, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    args = parser.parse_args()
    make_end_with_parent(args.parent_pid)()
    resource.setrlimit(resource.RLIMIT_AS, (args.memory_bytes, args.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    eos_ids, num_tokens = eos_token_ids(args.model_dir), vocabulary_size(args.model_dir)
    trial = GrammarTrial(GrammarLibrary(args.model_dir, eos_ids, num_tokens))
    # Only after the start, which must be fast; a trial may take longer when the machine is busy.
    os.nice(_NICENESS)
    _answer({"is_ready": True})
    # The library's output when a grammar crashes it may quote the grammar.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    for line in sys.stdin.buffer:
        # Beyond this the kernel kills the process.
        limit_cpu(args.cpu_s)
        answer = _try(trial, json.loads(line))
        limit_cpu(0.0)
        # Memory that a grammar leaves allocated must not count against the next one.
        _answer({**answer, "is_last": _memory_bytes() > args.memory_bytes / 2})
    return 0


def _try(trial: GrammarTrial, request: dict[str, Any]) -> dict[str, object]:
    kind, text, options = request["kind"], request["text"], FormOptions(**request["options"])
    try:
        grammar = trial.run(kind, text, options, around=request["around"], skipped_ids=request["skipped_ids"])
        return {
            "grammar": grammar.text,
            "not_held": grammar.not_held[:_MAX_NOT_HELD],
            "shortest_bytes": shortest_text(kind, text),
        }
    except SchemaError as error:
        # The place is short, and its names are what the client looks for.
        problem, place = without_quotes(error.problem, text), f", at {error.place}"
    except GrammarError as error:
        problem, place = without_quotes(str(error), text), ""
    except MemoryError:
        problem, place = "it takes too much memory", ""
    problem = problem[:_MAX_MESSAGE_LENGTH]
    return {"problem": problem + place, "is_too_complex": bool(_LIMIT_MESSAGE.search(problem))}


def _answer(answer: dict[str, object]) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


def _memory_bytes() -> int:
    num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return num_pages * resource.getpagesize()


if __name__ == "__main__":
    sys.exit(main())
