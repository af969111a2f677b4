"""The load on a front end: one token for each of many requests per step, with every text checked.

Needs only numpy and `tokenizers`, since a peer's driver runs in a separate environment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from tests.bench.peers.contestant import Stopwatch
from tests.bench.peers.protocol import ROOT

NUM_PROMPT_TOKENS = 128
MAX_HELD_BACK = 4
# Running text from this repository, and pieces that it lacks.
TEXT_FILE = ROOT / "README.md"
OTHER_TEXT = "Grüße aus Köln. Ça va très bien ! Привет, мир. 你好世界。今日は良い天気です。 🙂👩‍🚀 ± 5 µs ≤ ½\n" * 8


class FrontEnd(Protocol):
    """Turns a step's message into text for each request; only the measured work runs under `stopwatch`."""

    stopwatch: Stopwatch

    def settle(self) -> None:
        """Configure the garbage collector as the real process does after its start, before any request."""

    def begin(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        """Add requests."""

    def hand_over(self, token_ids: Sequence[int]) -> list[str]:
        """Process one step with one token per request, in order; returns the new text of each request."""


class Detokenize:
    """`num_seqs` requests that get one token per step, each from a different place of one text."""

    def __init__(self, make: Callable[[Path], FrontEnd], *, model_dir: str, num_seqs: int, num_steps: int,
                 num_repeats: int) -> None:  # fmt: skip
        tokenizer = Tokenizer.from_file(str(Path(model_dir) / "tokenizer.json"))
        self._tokenizer = tokenizer
        self._corpus = tokenizer.encode(TEXT_FILE.read_text(encoding="utf-8") + OTHER_TEXT).ids
        self._num_steps = num_steps
        self._places = [self._place_of(number, num_seqs) for number in range(num_seqs)]
        self._texts = [""] * num_seqs
        self._num_told = 0
        self._front_end = make(Path(model_dir))
        self._front_end.settle()
        prompts = [self._tokens(place - NUM_PROMPT_TOKENS, NUM_PROMPT_TOKENS) for place in self._places]
        self._front_end.begin(prompts, num_steps * (num_repeats + 2))
        self.run()

    def run(self) -> dict[str, float]:
        """Run one repeat; returns the mean per token."""
        before = self._front_end.stopwatch.seconds
        for _ in range(self._num_steps):
            self._step()
        self._check_texts()
        us = (self._front_end.stopwatch.seconds - before) * 1e6
        return {"token_us": us / (self._num_steps * len(self._places))}

    def _step(self) -> None:
        token_ids = [self._tokens(place + self._num_told, 1)[0] for place in self._places]
        self._num_told += 1
        for number, text in enumerate(self._front_end.hand_over(token_ids)):
            self._texts[number] += text

    def _check_texts(self) -> None:
        for place, text in zip(self._places, self._texts, strict=True):
            expected = self._tokenizer.decode(self._tokens(place, self._num_told))
            # Text is held back while the last token ends inside a character.
            assert expected.startswith(text), "a text that does not match its tokens"
            assert len(expected) - len(text) <= MAX_HELD_BACK, "too much text is held back"

    def _place_of(self, number: int, num_seqs: int) -> int:
        """Where a request's tokens begin: at a character boundary."""
        place = number * len(self._corpus) // num_seqs
        while "\ufffd" in self._tokenizer.decode(self._tokens(place, 1)):
            place += 1
        return place

    def _tokens(self, place: int, count: int) -> list[int]:
        return [self._corpus[(place + offset) % len(self._corpus)] for offset in range(count)]
