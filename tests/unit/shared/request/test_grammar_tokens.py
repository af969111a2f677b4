"""What a start asks of a tokenizer without its merges is what the whole library would say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models

from shared.model_files.model_dir import ADDED_TOKENS, TOKENIZER, ModelDirectoryError, read_tokenizer_files
from shared.request.grammar import GrammarLibrary, load_tokens
from tests.support.models.tiny_tokenizer import tiny_tokenizer
from tests.support.tokenizer.many_tokenizers import ALL_NAMES, tokenizers

EOS_IDS = [(), (0,), (1, 2), (100_000,)]
NUM_TOKENS = [None, 3, 100_000]


def outcome(directory: Path, eos_ids: tuple[int, ...], num_tokens: int | None, *, is_whole: bool) -> object:
    """What is known of the tokens, or why they are refused."""
    try:
        if is_whole:
            tokens = GrammarLibrary(directory, eos_ids, num_tokens).tokenizer
        else:
            tokens = load_tokens(read_tokenizer_files(directory), eos_ids, num_tokens)
    except ModelDirectoryError as error:
        return str(error)
    spelled = [tokens.decode_bytes([token_id]) for token_id in range(tokens.vocab_size)]
    special = [tokens.is_special_token(token_id) for token_id in range(tokens.vocab_size)]
    return spelled, special, tokens.eos_tokens


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("eos_ids", EOS_IDS)
@pytest.mark.parametrize("name", ALL_NAMES)
def test_tokens_are_those_of_the_whole_library(
    tmp_path: Path, name: str, eos_ids: tuple[int, ...], num_tokens: int | None
) -> None:
    tokenizers()[name].save(str(tmp_path / TOKENIZER))
    whole = outcome(tmp_path, eos_ids, num_tokens, is_whole=True)
    assert outcome(tmp_path, eos_ids, num_tokens, is_whole=False) == whole


def test_tokens_of_other_files_are_among_them(tmp_path: Path) -> None:
    tiny_tokenizer().save(str(tmp_path / TOKENIZER))
    (tmp_path / ADDED_TOKENS).write_text('{"<another>": 900}')
    whole = outcome(tmp_path, (0,), None, is_whole=True)
    assert outcome(tmp_path, (0,), None, is_whole=False) == whole
    assert isinstance(whole, tuple)
    assert b"<another>" in whole[0]


def without_decoder() -> Tokenizer:
    tokenizer = tiny_tokenizer()
    source = json.loads(tokenizer.to_str())
    return Tokenizer.from_str(json.dumps({**source, "decoder": None}))


REFUSED = {
    "no decoder": without_decoder(),
    "word pieces": Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
    "words": Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")),
    "unigrams": Tokenizer(models.Unigram([("a", -1.0), ("b", -2.0)], unk_id=0)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_library_refuses_is_refused_in_its_words(tmp_path: Path, name: str) -> None:
    REFUSED[name].add_tokens([AddedToken("<x>")])
    REFUSED[name].save(str(tmp_path / TOKENIZER))
    whole = outcome(tmp_path, (0,), None, is_whole=True)
    assert isinstance(whole, str)
    assert outcome(tmp_path, (0,), None, is_whole=False) == whole
