"""Matchers for a model's grammars, and what replaces them if the model's tokenizer cannot be read."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher

from services.worker.runner.matchers import GrammarMatchers
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.models.tiny_tokenizer import IM_END_ID

WIDTH = 512


def test_each_matcher_follows_a_grammar_from_its_beginning(tmp_path: Path) -> None:
    matchers = GrammarMatchers(write_tiny_llama(tmp_path), WIDTH, [IM_END_ID])
    first, second = (matchers.make(LLMatcher.grammar_from_regex("[ab]")) for _ in range(2))
    allowed = first.mask()
    assert allowed.shape == (WIDTH,)
    assert 0 < allowed.sum() < WIDTH
    first.advance(int(np.flatnonzero(allowed)[0]))
    assert np.flatnonzero(first.mask()).tolist() == [IM_END_ID]
    assert second.mask().tolist() == allowed.tolist()


def test_without_a_tokenizer_the_text_ends_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (write_tiny_llama(tmp_path) / "tokenizer.json").write_text("{}")
    matchers = GrammarMatchers(tmp_path, WIDTH, [IM_END_ID, 7])
    with caplog.at_level(logging.ERROR):
        matcher = matchers.make(LLMatcher.grammar_from_regex("[ab]"))
    assert [record.message for record in caplog.records] == ["no grammar can be followed"]
    for token_id in (IM_END_ID, 5):
        matcher.prepare()
        assert np.flatnonzero(matcher.mask()).tolist() == sorted([IM_END_ID, 7])
        matcher.advance(token_id)
