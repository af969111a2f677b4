"""What a front end is put through: the tokens of many requests a step, each text checked.

Needs numpy and `tokenizers` only, since a peer's driver runs in an environment of its own.
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
# Running text of this repository, and what is not in it.
TEXT_FILE = ROOT / "README.md"
OTHER_TEXT = "Grüße aus Köln. Ça va très bien ! Привет, мир. 你好世界。今日は良い天気です。 🙂👩‍🚀 ± 5 µs ≤ ½\n" * 8


class FrontEnd(Protocol):
    """Turns a step's message into text for each request; what is measured runs under `stopwatch`."""

    stopwatch: Stopwatch

    def settle(self) -> None:
        """What it tells the garbage collector once it has started, before there are requests."""

    def begin(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        """Take in requests."""

    def hand_over(self, token_ids: Sequence[int]) -> list[str]:
        """One step: a token each of the requests, in their order; returns the text that each has for its client."""


class Detokenize:
    """`num_seqs` requests that get a token in every step, from a different place of one text each."""

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
        """One repeat: the mean of its tokens."""
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
            # The last token is held back while it ends within a character.
            assert expected.startswith(text), "a text that its tokens do not have"
            assert len(expected) - len(text) <= MAX_HELD_BACK, "a text that is held back"

    def _place_of(self, number: int, num_seqs: int) -> int:
        """Where a request's tokens begin: with a whole character."""
        place = number * len(self._corpus) // num_seqs
        while "\ufffd" in self._tokenizer.decode(self._tokens(place, 1)):
            place += 1
        return place

    def _tokens(self, place: int, count: int) -> list[int]:
        return [self._corpus[(place + offset) % len(self._corpus)] for offset in range(count)]
