"""The tokens that a grammar's matcher allows, token by token."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import numpy.typing as npt
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from services.worker.sampling import grammar as worker_grammar
from services.worker.sampling.grammar import GrammarCompiler
from shared.model_files.model_dir import TOKENIZER, ModelDirectoryError
from tests.support.models.tiny_tokenizer import ENDOFTEXT_ID, IM_END_ID, VOCABULARY_SIZE, write_tiny_tokenizer
from tests.support.tokenizer.grammar_texts import TextWriter

# Wider than the vocabulary, as in a model with padded embeddings.
WIDTH = VOCABULARY_SIZE + 92
AMBIGUOUS = 'start: s\ns: s s | "a"'

SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["b"]},
    {"type": "array", "items": {"enum": ["x", 1, None, {"y": []}]}, "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [{"const": "é"}, {"type": "boolean"}], "items": False, "minItems": 2},
    {"anyOf": [{"type": "null"}, {"type": "number", "exclusiveMinimum": 0, "maximum": 9.5}]},
    {"type": "string", "pattern": "^[a-c]{2,5}$"},
    {"type": "string", "minLength": 1, "maxLength": 4},
    {"type": "object", "additionalProperties": {"type": "integer", "multipleOf": 7}, "minProperties": 1},
    {"$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}, "$ref": "#/$defs/tree"},
    {"type": "string", "format": "date"},
]


def json_grammar(schema: object) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(schema))


def regex_grammar(regex: str) -> str:
    return LLMatcher.grammar_from_regex(regex)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the tiny tokenizer."""
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def writer(model_dir: Path) -> TextWriter:
    """A writer with the tiny tokenizer and padded logits."""
    return TextWriter(model_dir, WIDTH)


def ids(mask: npt.NDArray[np.bool_]) -> list[int]:
    """The allowed tokens."""
    return [int(token_id) for token_id in np.flatnonzero(mask)]


def test_a_mask_allows_exactly_the_tokens_whose_text_fits(writer: TextWriter) -> None:
    mask = writer.compiler.matcher(regex_grammar("[a-z ]+")).mask()
    texts = [writer.tokenizer.decode([token_id], skip_special_tokens=False) for token_id in range(VOCABULARY_SIZE)]
    assert mask.dtype == np.bool_
    assert mask.shape == (WIDTH,)
    assert ids(mask) == [token_id for token_id, text in enumerate(texts) if re.fullmatch("[a-z ]+", text)]


def test_special_tokens_and_ids_outside_the_tokenizer_are_never_allowed(writer: TextWriter) -> None:
    mask = writer.compiler.matcher(regex_grammar("(?s:.*)")).mask()
    assert not mask[VOCABULARY_SIZE:].any()
    assert [token_id for token_id in range(3) if mask[token_id]] == [IM_END_ID]


def test_every_end_token_is_allowed_exactly_where_the_text_may_end(model_dir: Path) -> None:
    ends = [ENDOFTEXT_ID, IM_END_ID]
    compiler = GrammarCompiler(model_dir, WIDTH, ends)
    a_id = TextWriter(model_dir, WIDTH).encode("a")[0]
    matcher = compiler.matcher(regex_grammar("a(aa)*"))
    assert ids(matcher.mask()) == [a_id]
    matcher.advance(a_id)
    assert ids(matcher.mask()) == [*ends, a_id]
    matcher.advance(a_id)
    assert ids(matcher.mask()) == [a_id]


def test_after_the_end_and_after_the_last_character_only_the_end_is_allowed(writer: TextWriter) -> None:
    matcher = writer.matcher_after(regex_grammar("ab?"), writer.encode("ab"))
    assert ids(matcher.mask()) == [IM_END_ID]
    open_matcher = writer.matcher_after(regex_grammar("a+"), writer.encode("a"))
    for _ in range(3):
        open_matcher.advance(IM_END_ID)
        assert ids(open_matcher.mask()) == [IM_END_ID]
    assert not open_matcher.has_failed


@pytest.mark.parametrize("stranger", ["b", "<|im_start|>", VOCABULARY_SIZE + 1, WIDTH - 1])
def test_after_a_token_that_does_not_fit_only_the_end_is_allowed(writer: TextWriter, stranger: str | int) -> None:
    matcher = writer.matcher_after(regex_grammar("a+"), writer.encode("a"))
    matcher.advance(stranger if isinstance(stranger, int) else writer.encode(stranger)[0])
    for _ in range(3):
        assert ids(matcher.mask()) == [IM_END_ID]
        matcher.advance(writer.encode("a")[0])


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_complete_texts_fit_their_schema(writer: TextWriter, schema: dict[str, Any]) -> None:
    texts = [writer.write(json_grammar(schema), seed) for seed in range(20)]
    ended = [writer.decode(token_ids) for token_ids in texts if token_ids is not None]
    assert len(ended) >= 10
    for text in ended:
        jsonschema.validate(json.loads(text), schema)


def test_texts_of_a_regex_match_it(writer: TextWriter) -> None:
    regex = r"(yes|no)(, (yes|no)){0,3}\."
    texts = [writer.write(regex_grammar(regex), seed) for seed in range(30)]
    ended = {writer.decode(token_ids) for token_ids in texts if token_ids is not None}
    assert len(ended) >= 5
    assert all(re.fullmatch(regex, text) for text in ended)


def test_a_matcher_that_gets_the_text_so_far_continues_like_the_one_that_wrote_it(writer: TextWriter) -> None:
    grammar = json_grammar(SCHEMAS[0])
    token_ids = writer.encode('{"a": "né", "b": 12}')
    first = writer.compiler.matcher(grammar)
    for index, token_id in enumerate(token_ids):
        assert np.array_equal(writer.matcher_after(grammar, token_ids[:index]).mask(), first.mask())
        first.advance(token_id)
    assert writer.may_end(first)


def test_prepared_masks_are_the_same(writer: TextWriter) -> None:
    grammar = json_grammar(SCHEMAS[0])
    plain, prepared = writer.compiler.matcher(grammar), writer.compiler.matcher(grammar)
    for token_id in writer.encode('{"a": "fox", "b": -1}'):
        prepared.prepare()
        assert np.array_equal(prepared.mask(), plain.mask())
        # Prepared again, though no longer needed.
        prepared.prepare()
        for matcher in (plain, prepared):
            matcher.advance(token_id)
    assert np.array_equal(prepared.mask(), plain.mask())


def test_matchers_of_one_grammar_are_independent(writer: TextWriter) -> None:
    grammar = regex_grammar("ab|cd")
    after_a = writer.matcher_after(grammar, writer.encode("a"))
    after_c = writer.matcher_after(grammar, writer.encode("c"))
    assert ids(after_a.mask()) == writer.encode("b")
    assert ids(after_c.mask()) == writer.encode("d")
    assert writer.fits(grammar, "ab")


def test_more_grammars_than_stay_compiled_all_work(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_grammar, "_MAX_COMPILED", 2)
    writer = TextWriter(model_dir, WIDTH)
    for _ in range(2):
        assert all(writer.fits(regex_grammar(letter), letter) for letter in "abcd")


def test_a_text_that_needs_a_token_missing_from_the_model_ends(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = Tokenizer.from_file(str(model_dir / TOKENIZER))
    tokenizer.add_tokens(["<call>"])
    tokenizer.save(str(tmp_path / TOKENIZER))
    compiler = GrammarCompiler(tmp_path, VOCABULARY_SIZE, [IM_END_ID])
    matcher = compiler.matcher("start: /a*/ <[420]>")
    assert matcher.mask().shape == (VOCABULARY_SIZE,)
    assert not matcher.has_failed
    matcher = compiler.matcher("start: <[420]>")
    assert ids(matcher.mask()) == [IM_END_ID]
    assert matcher.has_failed
    assert [record.message for record in caplog.records] == ["a grammar cannot be followed"]


def test_a_grammar_that_does_not_compile_ends_its_text_and_is_not_quoted(
    writer: TextWriter, caplog: pytest.LogCaptureFixture
) -> None:
    matcher = writer.compiler.matcher("start: secret")
    for _ in range(2):
        assert ids(matcher.mask()) == [IM_END_ID]
        matcher.advance(writer.encode("a")[0])
    assert matcher.has_failed
    assert [record.message for record in caplog.records] == ["a grammar cannot be followed"]
    assert "secret" not in str(vars(caplog.records[0]))


def test_a_text_that_costs_too_much_to_follow_ends(writer: TextWriter) -> None:
    matcher = writer.compiler.matcher(AMBIGUOUS)
    a_id = writer.encode("a")[0]
    while matcher.mask()[a_id]:
        matcher.advance(a_id)
    assert ids(matcher.mask()) == [IM_END_ID]
    assert matcher.has_failed


def test_logits_may_be_narrower_than_the_tokenizers_vocabulary(model_dir: Path) -> None:
    narrow, wide = (TextWriter(model_dir, width).compiler for width in (300, WIDTH))
    mask = wide.matcher(regex_grammar("[a-z]*")).mask()
    assert np.array_equal(narrow.matcher(regex_grammar("[a-z]*")).mask(), mask[:300])


def test_a_grammar_is_followed_for_a_model_without_an_end_token(model_dir: Path) -> None:
    matcher = GrammarCompiler(model_dir, WIDTH, ()).matcher(regex_grammar("ab?"))
    a_id = TextWriter(model_dir, WIDTH).encode("a")[0]
    assert ids(matcher.mask()) == [a_id]
    # The tokenizer's own end has no text: the completion continues with it up to its length limit.
    matcher.advance(a_id)
    assert len(ids(matcher.mask())) == 2


@pytest.mark.parametrize("source", [None, "{}"])
def test_a_directory_without_a_usable_tokenizer_is_refused(tmp_path: Path, source: str | None) -> None:
    if source is not None:
        (tmp_path / "tokenizer.json").write_text(source)
    with pytest.raises(ModelDirectoryError, match=r"tokenizer\.json"):
        GrammarCompiler(tmp_path, WIDTH, (IM_END_ID,))
