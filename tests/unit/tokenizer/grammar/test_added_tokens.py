"""Forms whose literals are, or contain, added tokens of the tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from services.tokenizer.grammar.grammar_source import grammar_source
from services.tokenizer.replies.grammars.lark import LarkGrammar
from shared.model_files.model_dir import TOKENIZER
from shared.request.grammar import GrammarLibrary
from tests.support.tokenizer.many_tokenizers import ALL_NAMES, NAMES, tokenizers

LITERALS = ["<think>", "<|im_end|>", "[b]", "a<think>b</think>", "<think<think>"]
# The tokenizer would write it with other characters.
DECOMPOSED = "e\u0301"
MAX_TOKENS = 200


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GrammarLibrary]:
    """The library with each kind of tokenizer."""
    return {name: library_for(tokenizers()[name], tmp_path_factory.mktemp(name)) for name in ALL_NAMES}


def library_for(tokenizer: Tokenizer, directory: Path) -> GrammarLibrary:
    """The library with a tokenizer."""
    tokenizer.save(str(directory / TOKENIZER))
    return GrammarLibrary(directory, (0,))


def written(library: GrammarLibrary, grammar: str, *, prefers_long: bool) -> str:
    """A text that a model writes under the masks: of random tokens, or of the longest ones."""
    random, matcher, tokens = np.random.default_rng(0), library.compile(grammar), []
    for _ in range(MAX_TOKENS):
        mask = library.allowed_tokens(matcher)
        mask[library.tokenizer.eos_tokens] = False
        allowed = [int(token_id) for token_id in np.flatnonzero(mask)]
        if not allowed:
            break
        length = {token_id: len(library.tokenizer.decode_bytes([token_id])) for token_id in allowed}
        tokens.append(max(allowed, key=length.__getitem__) if prefers_long else int(random.choice(allowed)))
        assert matcher.consume_token(tokens[-1]), matcher.get_error()
    return library.tokenizer.decode_bytes(tokens).decode()


def forms_of(literal: str) -> list[tuple[str, str, str]]:
    """Forms with exactly one text, and it."""
    quoted = json.dumps(literal, ensure_ascii=False)
    pattern = "".join(f"\\u{ord(character):04x}" for character in literal)
    regex = literal.translate({ord(character): f"\\{character}" for character in "[]|"})
    return [
        ("choices", json.dumps([literal]), literal),
        ("regex", regex, literal),
        ("grammar", f"start: {quoted}", literal),
        ("grammar", f"start: x\nx: A\nA: {quoted}", literal),
        ("grammar", f"root ::= {quoted}", literal),
        ("json_schema", json.dumps({"const": literal}), quoted),
        ("json_schema", json.dumps({"enum": [literal]}), quoted),
        ("json_schema", json.dumps({"type": "string", "pattern": f"^{pattern}$"}), quoted),
    ]


@pytest.mark.parametrize("name", ALL_NAMES)
@pytest.mark.parametrize("literal", LITERALS)
def test_a_literal_that_is_an_added_token_is_written(
    libraries: dict[str, GrammarLibrary], name: str, literal: str
) -> None:
    for kind, source, text in forms_of(literal):
        grammar = grammar_source(kind, source).text
        texts = [written(libraries[name], grammar, prefers_long=prefers_long) for prefers_long in (False, True)]
        assert texts == [text] * 2, (kind, source)


@pytest.mark.parametrize("name", NAMES)
def test_a_literal_that_the_tokenizer_would_change_is_written_as_it_is(
    libraries: dict[str, GrammarLibrary], name: str
) -> None:
    for kind, source, text in forms_of(DECOMPOSED):
        assert written(libraries[name], grammar_source(kind, source).text, prefers_long=True) == text, (kind, source)


@pytest.mark.parametrize("name", ["qwen", "llama-2"])
def test_the_arguments_of_a_tool_may_be_an_added_token(libraries: dict[str, GrammarLibrary], name: str) -> None:
    grammar = LarkGrammar({})
    source = grammar.source(f"{grammar.literal('</think>')} {grammar.json({'const': '<think>'})}")
    assert written(libraries[name], source, prefers_long=True) == '</think>"<think>"'


def test_a_token_may_still_be_named(libraries: dict[str, GrammarLibrary]) -> None:
    library = libraries["qwen"]
    token_id = tokenizers()["qwen"].token_to_id("<think>")
    mask = library.allowed_tokens(library.compile(grammar_source("grammar", 'start: <think> "a"').text))
    assert list(np.flatnonzero(mask)) == [token_id]
