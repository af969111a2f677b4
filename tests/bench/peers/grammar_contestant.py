"""The interface of every measured grammar library, and the load on it.

Needs only numpy, tokenizers and jsonschema, since the peers' drivers run in separate virtual environments.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
from referencing.exceptions import Unresolvable
from tokenizers import Tokenizer

from tests.support.tokenizer.json_schema_suite import SuiteSchema, read_suite

# Tokens that close strings, lists and objects.
_CLOSERS = ('"', "}", "]", '"}', ",", '":', "1", "0", "Ġ")
_NUM_TEXTS = 3
_MAX_TOKENS = 120


class Matcher(Protocol):
    """Follows one text."""

    def mask(self) -> npt.NDArray[np.uint32]:
        """The allowed next tokens, one bit each."""

    def advance(self, token_id: int) -> None:
        """Advance by an allowed token."""


class Grammars(Protocol):
    """A library with a model's vocabulary."""

    def compile(self, schema: str) -> object:
        """Compile a JSON schema.

        Raises:
            Exception: The library refuses it.
        """

    def matcher(self, compiled: object) -> Matcher:
        """A matcher at the start of a text."""


@dataclass
class Tally:
    """The results of the suite so far; times in µs."""

    counts: Counter[str] = field(default_factory=Counter)
    compile_us: list[float] = field(default_factory=list)
    mask_us: list[float] = field(default_factory=list)

    def share(self, name: str, other: str) -> float:
        """The share of `name` in the sum of both counts, in percent."""
        return 100 * self.counts[name] / (self.counts[name] + self.counts[other])

    def figures(self) -> dict[str, float]:
        """Shares in percent, times in µs."""
        figures = {
            "taken_percent": self.share("taken", "refused"),
            "good_percent": self.share("good_taken", "good_refused"),
            "bad_percent": self.share("bad_taken", "bad_refused"),
            "misfit_percent": self.share("misfit", "fit"),
        }
        for name, times in (("compile", self.compile_us), ("mask", self.mask_us)):
            for percent in (50, 99, 100):
                figures[f"{name}_p{percent}_us"] = float(np.percentile(times, percent))
            figures[f"{name}_mean_us"] = float(np.mean(times))
        return figures


class Suite:
    """Every schema of the JSON Schema Test Suite: compiled, checked against values, and used to write texts."""

    def __init__(self, grammars: Grammars, model_dir: str, eos_token_id: int) -> None:
        self._grammars = grammars
        self._tokenizer = Tokenizer.from_file(str(Path(model_dir) / "tokenizer.json"))
        self._eos_token_id = eos_token_id
        ids = [self._tokenizer.token_to_id(text) for text in _CLOSERS]
        self._closers = np.array([token_id for token_id in ids if token_id is not None])
        self._schemas = read_suite()

    def run(self) -> dict[str, float]:
        """Run the whole suite once."""
        tally = Tally()
        random = np.random.default_rng(1)
        for schema in self._schemas:
            start = time.thread_time()
            try:
                compiled = self._grammars.compile(schema.source)
            except Exception:  # noqa: BLE001 - each library has its own
                tally.counts["refused"] += 1
                continue
            tally.compile_us.append((time.thread_time() - start) * 1e6)
            tally.counts["taken"] += 1
            for values, name in ((schema.good, "good"), (schema.bad, "bad")):
                for value in values:
                    is_taken = self._takes(compiled, json.dumps(value, ensure_ascii=False), tally)
                    tally.counts[f"{name}_{'taken' if is_taken else 'refused'}"] += 1
            for _ in range(_NUM_TEXTS):
                self._write(compiled, schema, random, tally)
        return tally.figures()

    def _takes(self, compiled: object, text: str, tally: Tally) -> bool:
        matcher = self._grammars.matcher(compiled)
        for token_id in self._tokenizer.encode(text, add_special_tokens=False).ids:
            if not self._allowed(matcher, tally)[token_id]:
                return False
            matcher.advance(token_id)
        return bool(self._allowed(matcher, tally)[self._eos_token_id])

    def _write(self, compiled: object, schema: SuiteSchema, random: np.random.Generator, tally: Tally) -> None:
        """Write one random text; if it is complete, check it against the schema."""
        matcher = self._grammars.matcher(compiled)
        token_ids: list[int] = []
        while len(token_ids) < _MAX_TOKENS:
            allowed = self._allowed(matcher, tally)
            may_end = allowed[self._eos_token_id]
            allowed[self._eos_token_id] = False
            if may_end and (not allowed.any() or random.random() < 0.3):
                text = self._tokenizer.decode(token_ids, skip_special_tokens=False)
                tally.counts[_judge(schema, text)] += 1
                return
            if not allowed.any():
                return
            closers = self._closers[allowed[self._closers]]
            choices = closers if len(closers) and random.random() < 0.7 else np.flatnonzero(allowed)
            token_ids.append(int(random.choice(choices)))
            matcher.advance(token_ids[-1])

    def _allowed(self, matcher: Matcher, tally: Tally) -> npt.NDArray[np.bool_]:
        start = time.thread_time()
        words = matcher.mask()
        tally.mask_us.append((time.thread_time() - start) * 1e6)
        return np.unpackbits(words.view(np.uint8), bitorder="little").view(np.bool_)


def _judge(schema: SuiteSchema, text: str) -> str:
    try:
        return "fit" if schema.is_fit(text) else "misfit"
    except Unresolvable:
        # The schema refers to another document, so this is undecidable.
        return "unknown"
    except ValueError:
        return "misfit"
