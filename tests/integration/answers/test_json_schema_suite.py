"""Grammars of the JSON Schema Test Suite: every complete text is valid, and no invalid value is allowed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.tokenizer.grammar.grammar_source import grammar_source
from services.tokenizer.grammar.grammar_trial import GrammarTrial
from shared.model_files.model_dir import eos_token_ids
from shared.request.grammar import GrammarError, GrammarLibrary
from tests.support.models.tiny_llama import TINY_CONFIG
from tests.support.tokenizer.grammar_texts import TextWriter
from tests.support.tokenizer.json_schema_suite import SuiteSchema, read_suite

# Out of 1365. The others use keywords about the whole value, such as `not` or `uniqueItems`.
MIN_SUPPORTED = 840
NUM_TEXTS = 3


@pytest.fixture(scope="module")
def writer(tiny_model: Path) -> TextWriter:
    """A text writer with the tiny model's tokenizer."""
    return TextWriter(tiny_model, TINY_CONFIG["vocab_size"])


def body_of(schema: SuiteSchema) -> str:
    """The schema as JSON text, without its dialect."""
    return json.dumps({name: value for name, value in schema.schema.items() if name != "$schema"})


@pytest.fixture(scope="module")
def supported(tiny_model: Path) -> list[tuple[SuiteSchema, str]]:
    """The supported schemas of the suite, each with its grammar.

    The dialects have most schemas in common. Each is tried once, and only compiled in the other dialects.
    """
    library = GrammarLibrary(tiny_model, eos_token_ids(tiny_model))
    trial = GrammarTrial(library)
    schemas = []
    tried = set()
    for schema in read_suite():
        try:
            body = body_of(schema)
            if body in tried:
                grammar = grammar_source("json_schema", schema.source).text
                library.compile(grammar)
            else:
                grammar = trial.run("json_schema", schema.source).text
        except GrammarError as error:
            assert str(error)  # noqa: PT017 - no schema is refused without a reason
        else:
            tried.add(body)
            schemas.append((schema, grammar))
    return schemas


def test_most_of_the_suite_is_supported(supported: list[tuple[SuiteSchema, str]]) -> None:
    assert len(supported) >= MIN_SUPPORTED


def test_every_text_that_ends_fits_its_schema(writer: TextWriter, supported: list[tuple[SuiteSchema, str]]) -> None:
    num_ended = 0
    for schema, grammar in supported:
        texts = [writer.write(grammar, seed) for seed in range(NUM_TEXTS)]
        ended = [writer.decode(token_ids) for token_ids in texts if token_ids is not None]
        assert [text for text in ended if not schema.is_fit(text)] == [], schema.name
        num_ended += bool(ended)
    assert num_ended >= MIN_SUPPORTED


def test_no_value_is_let_through_that_does_not_fit(
    writer: TextWriter, supported: list[tuple[SuiteSchema, str]]
) -> None:
    for schema, grammar in supported:
        bad = [json.dumps(value, ensure_ascii=False) for value in schema.bad]
        assert [text for text in bad if writer.fits(grammar, text)] == [], schema.name


def test_values_that_fit_are_allowed(writer: TextWriter, supported: list[tuple[SuiteSchema, str]]) -> None:
    values = [
        (grammar, json.dumps(value, ensure_ascii=False)) for schema, grammar in supported for value in schema.good
    ]
    num_allowed = sum(writer.fits(grammar, text) for grammar, text in values)
    # The others have their properties in a different order than the schema.
    assert num_allowed >= 0.95 * len(values)
