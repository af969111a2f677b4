"""Kimi's vocabulary, converted, compared with tiktoken and with the splitting of texts in Kimi's own code."""

from __future__ import annotations

import base64
import itertools
import json
import resource
import sys
import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import tiktoken
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from services.tokenizer.text.encoder import Encoder
from services.tokenizer.text.model_tokenizer import load_tokenizer
from shared.model_files.missing_files import TIKTOKEN
from shared.model_files.model_dir import TOKENIZER, TOKENIZER_CONFIG, ModelDirectoryError, read_tokenizer
from shared.model_files.tiktoken_vocabulary import (
    NUM_SPECIAL_TOKENS,
    WORDS,
    convert_vocabulary,
    merges_of,
    tokenizer_of,
)
from shared.request.grammar import GrammarLibrary
from tests.support.models.kimi_vocabulary import (
    SPECIAL_TOKENS,
    kimi_config,
    trained_ranks,
    write_kimi_vocabulary,
    write_ranks,
)
from tests.support.tokenizer.many_tokenizers import BITS, TEXTS

BYTES = {bytes([value]): value for value in range(256)}
# What the pattern tells apart: Han beside other letters, marks, apostrophes in any case, digits, blanks, line ends.
MORE_BITS = [
    *["汉字", "々", "〇", "⺀", "a", "B", "ǅ", "ʼ", "ß", "ſ", "K", "e\u0301", "\u0301", "\u0bc1", "ב\u05bc", "ไทย"],  # noqa: RUF001
    *["'S", "'re", "'VE", "'ſ", "’s", "'l", "'LL", "don't", "12", "1234", "٤٥", "Ⅻ", "²"],  # noqa: RUF001
    *["   ", " \n", "\n ", "\r\n\r\n", "\t\t", "\u00a0\n", "...", " !?", "#\n\n", "/"],
    *["<|reserved_token_605|>", "<|im_user|>", "<|tool_call_begin|>", "<|im_", "<|", "|>"],
]


def oracle(ranks: dict[bytes, int]) -> tiktoken.Encoding:
    """tiktoken, as Kimi's code makes it."""
    named = {len(ranks) + place: text for text, (place, _) in SPECIAL_TOKENS.items()}
    ids = range(len(ranks), len(ranks) + NUM_SPECIAL_TOKENS)
    special = {named.get(token_id, f"<|reserved_token_{token_id}|>"): token_id for token_id in ids}
    return tiktoken.Encoding("kimi", pat_str=WORDS, mergeable_ranks=ranks, special_tokens=special)


def converted(ranks: dict[bytes, int]) -> Tokenizer:
    with TemporaryDirectory() as directory:
        write_kimi_vocabulary(Path(directory), ranks)
        return Tokenizer.from_str(json.dumps(tokenizer_of(Path(directory))))


@cache
def both() -> tuple[Tokenizer, tiktoken.Encoding]:
    ranks = trained_ranks()
    return converted(ranks), oracle(ranks)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


@given(st.lists(st.sampled_from([*BITS, *MORE_BITS]), max_size=12).map("".join) | TEXTS)
@example("I'LL don'T it's'S 12345 汉字a汉 漢B々〇。\r\n\n  x\u3000\u3000y")  # noqa: RUF001
def test_any_text_has_tiktokens_ids(text: str) -> None:
    tokenizer, encoding = both()
    ids = encoding.encode(text, allowed_special="all")
    assert ids_of(tokenizer, text) == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(("stride", "per_category"), [(101, 12), pytest.param(1, 4000, marks=pytest.mark.proof)])
def test_words_of_all_kinds_of_characters_end_where_tiktokens_do(stride: int, per_category: int) -> None:
    """A word that is a token shows that it was one word."""
    codes = {*range(0x3100), *range(0x3100, sys.maxunicode + 1, stride)} - {*range(0xD800, 0xE000)}
    by_category: dict[str, list[str]] = {}
    for code in sorted(codes):
        by_category.setdefault(unicodedata.category(chr(code)), []).append(chr(code))
    kinds = by_category.values()
    characters = [each for kind in kinds for each in kind[:: len(kind) // per_category + 1]]
    forms = ("汉%s", "a%s", "A%sb", "1%s", "!%s", " %s", "%sa", "%s汉", "%s1", "%s!", "\n%s", "'%s")
    for start in range(0, len(characters), 20_000):
        check_words(sorted({form % each for each in characters[start : start + 20_000] for form in forms}))


def check_words(probes: list[str]) -> None:
    ranks = BYTES | {probe.encode(): 256 + index for index, probe in enumerate(probes)}
    split = both()[0].pre_tokenizer.pre_tokenize_str
    pieces = oracle(ranks).encode_ordinary_batch(probes, num_threads=1)
    for probe, tokens in zip(probes, pieces, strict=True):
        assert (len(split(probe)) == 1) == (len(tokens) == 1), ascii(probe)


@given(
    st.lists(st.text("ab", min_size=2, max_size=5), unique=True, max_size=12),
    st.lists(st.text("ab", max_size=14), max_size=30),
)
@example(["ab", "abb"], ["abb", "aabb"])
@example(["aba", "ab", "ba"], ["aba", "abab", "ababa", "babab"])
@example(["abab", "aba"], ["abab", "ababab"])
def test_ranks_that_no_training_gives_are_joined_alike(tokens: list[str], texts: list[str]) -> None:
    ranks = {token.encode(): rank for rank, token in enumerate(["a", "b", *tokens])}
    encoding = tiktoken.Encoding("ab", pat_str="(?s:.+)", mergeable_ranks=ranks, special_tokens={})
    merges = [(left.decode(), right.decode()) for left, right in merges_of(ranks)]
    vocabulary = {token.decode(): rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    for text in texts:
        assert ids_of(tokenizer, text) == encoding.encode_ordinary(text)


def kimi_parts(text: str) -> Iterator[str]:
    """Where Kimi's own code cuts: every 25 000 characters of a run of whitespace, or of others."""
    start = length = 0
    for index, (before, character) in enumerate(itertools.pairwise(text), start=1):
        length = length + 1 if before.isspace() == character.isspace() else 0
        if length >= 25_000:
            yield text[start:index]
            start, length = index, 0
    yield text[start:]


@pytest.mark.parametrize("unit", ["a", "汉", "!", "1", " ", "\u0301", "aB", " \n", "don't "])
def test_long_runs_are_encoded_whole(unit: str) -> None:
    tokenizer, encoding = both()
    text = "x " + unit * (60_000 // len(unit)) + " y"
    ids = ids_of(tokenizer, text)
    assert ids == encoding.encode_ordinary(text)
    parts = list(kimi_parts(text))
    assert len(parts) == (1 if unit == "don't " else 3)
    # Kimi's ids: some more at each cut.
    cut = [token for part in parts for token in encoding.encode_ordinary(part)]
    assert abs(len(cut) - len(ids)) <= 4 * (len(parts) - 1)
    assert encoding.decode(cut) == text


def test_both_services_and_the_grammars_know_the_same_tokens(tmp_path: Path) -> None:
    write_kimi_vocabulary(tmp_path)
    assert convert_vocabulary(tmp_path)
    encoding = both()[1]
    # The service, by transformers' classes, but without the model's code.
    model = load_tokenizer(tmp_path)
    encoder = Encoder(model.backend)
    # The worker, by the files.
    worker = Tokenizer.from_str(read_tokenizer(tmp_path))
    special = {text for text, (_, is_special) in SPECIAL_TOKENS.items() if is_special}
    num_tokens = encoding.n_vocab - NUM_SPECIAL_TOKENS
    assert encoder.special_tokens >= special | {f"<|reserved_token_{num_tokens + 5}|>"}
    assert "<think>" not in encoder.special_tokens
    assert model.special_tokens["bos_token"] == "[BOS]"
    grammars = GrammarLibrary(tmp_path, (num_tokens + 1,))
    assert grammars.tokenizer.vocab_size == encoding.n_vocab
    for text in ("Hi 汉字!<think>x</think><|im_end|>", "<|reserved_token_605|> don't"):
        ids = encoding.encode(text, allowed_special="all")
        assert ids_of(model.backend, text) == ids_of(worker, text) == ids
    # No text has the byte 0xFF, with which the grammars' library marks special tokens.
    for token_id in set(range(num_tokens)) - {encoding.encode_single_token(b"\xff")}:
        assert grammars.tokenizer.decode_bytes([token_id]) == encoding.decode_single_token_bytes(token_id)


def test_the_file_is_written_once_and_whole(tmp_path: Path) -> None:
    write_kimi_vocabulary(tmp_path)
    # The disk is full: no part of it stays.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(
            ModelDirectoryError, match=r"tokenizer\.json: cannot be written, to convert tiktoken\.model"
        ):
            convert_vocabulary(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name for path in tmp_path.iterdir()} == {TIKTOKEN, TOKENIZER_CONFIG, "tokenization_kimi.py"}
    assert convert_vocabulary(tmp_path)
    content = (tmp_path / TOKENIZER).read_bytes()
    assert not convert_vocabulary(tmp_path)
    (tmp_path / TOKENIZER).unlink()
    assert convert_vocabulary(tmp_path)
    assert (tmp_path / TOKENIZER).read_bytes() == content
    (tmp_path / TIKTOKEN).unlink()
    (tmp_path / TOKENIZER).unlink()
    assert not convert_vocabulary(tmp_path)


def lines(*more: bytes, without: int = -1) -> bytes:
    tokens = [b"%s %d" % (base64.b64encode(token), rank) for token, rank in BYTES.items()]
    return b"\n".join([*tokens[:without], *tokens[without + 1 :], *more] if without >= 0 else [*tokens, *more])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lines(b"!!! 256"), "tiktoken.model, line 257: no token in base64"),
        (lines(b"YWI"), "line 257: no token in base64"),
        (lines(b"YWI="), "line 257: no rank"),
        (lines(b"YWI= x"), "line 257: no rank"),
        (lines(b"YWI= -1"), "line 257: no rank"),
        (lines(b"YWI= 2_5_6"), "line 257: no rank"),
        (lines("YWI= ²".encode()), "line 257: no rank"),
        (lines(b"YWI= " + b"9" * 100), "line 257: no rank"),
        (lines(b"YWI= 256 257"), "line 257: no rank"),
        (lines(b" 256"), "line 257: no token|line 257: the token is empty|line 257: no rank"),
        (lines(b"YWI= 256", b"YWI= 257"), "line 258: the token of line 257 again"),
        (lines(b"YWI= 256", b"", b"YWM= 256"), "line 259: the rank of line 257 again: 256"),
        (lines(b"YWI= 300"), "no token has rank 256, although there are 257 tokens"),
        (lines(without=65).replace(b" 255", b" 65"), "the byte 0x41 is no token"),
        (b"", "the byte 0x00 is no token"),
        (lines(b"A" * 5000 + b" 256"), "line 257: longer than 4096 bytes"),
        (bytes(10_000), "line 1: longer than 4096 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
    ],
)
def test_a_broken_vocabulary_is_told_with_its_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / TIKTOKEN).write_bytes(content)
    (tmp_path / TOKENIZER_CONFIG).write_text(json.dumps({"tokenizer_class": "TikTokenTokenizer"}))
    with pytest.raises(ModelDirectoryError, match=message):
        convert_vocabulary(tmp_path)
    assert not (tmp_path / TOKENIZER).exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer_class": "QWenTokenizer"}, "tokenizer_class is 'QWenTokenizer': only tiktoken.model of TikToken"),
        ({"added_tokens_decoder": []}, "added_tokens_decoder is not an object"),
        (
            {"added_tokens_decoder": {"255": {"content": "x"}}},
            "has '255': special tokens are 256 to 511, after the 256",
        ),
        ({"added_tokens_decoder": {"512": {"content": "x"}}}, "has '512'"),
        ({"added_tokens_decoder": {"x": {"content": "x"}}}, "has 'x'"),
        ({"added_tokens_decoder": {"300": {"content": ""}}}, "300 has no text as its content"),
        ({"added_tokens_decoder": {"300": {"content": "\ud800"}}}, "300 has no text as its content"),
        ({"added_tokens_decoder": {"300": "x"}}, "300 has no text as its content"),
        ({"added_tokens_decoder": {"300": {"content": "x"}}}, "300 is 'x', as 120 is"),
        ({"added_tokens_decoder": {"300": {"content": "xy"}, "301": {"content": "xy"}}}, "301 is 'xy', as 300 is"),
    ],
)
def test_special_tokens_that_cannot_be_are_told(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write_ranks(tmp_path / TIKTOKEN, BYTES)
    (tmp_path / TOKENIZER_CONFIG).write_text(json.dumps(kimi_config(256) | change))
    with pytest.raises(ModelDirectoryError, match=message):
        convert_vocabulary(tmp_path)


def test_a_vocabulary_without_its_configuration_is_told(tmp_path: Path) -> None:
    write_ranks(tmp_path / TIKTOKEN, BYTES)
    with pytest.raises(ModelDirectoryError, match=r"tokenizer_config\.json: No such file"):
        convert_vocabulary(tmp_path)
