"""Vocabularies of GGUF files split and encode texts as llama.cpp and the models' own tokenizers do."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from gguf import TokenType
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from services.worker.weights.gguf_import.metadata import Metadata, UnsupportedGgufError
from services.worker.weights.gguf_import.pre_tokenizers import PRE_TOKENIZERS
from services.worker.weights.gguf_import.tokenizer import end_token_ids, write_tokenizer
from tests.support.models.tiny_tokenizer import tiny_tokenizer

SPACE = "\u2581"
TRAINING = ["the quick brown fox jumps over the lazy dog  and the dog sleeps", "naïve café, 2024: über größe"]


def metadata(kind: str, architecture: str = "llama", **values: Any) -> Metadata:
    """The metadata of a vocabulary; values are named as GGUF does under tokenizer.ggml."""
    ours = {f"tokenizer.ggml.{name}": value for name, value in values.items()}
    general = {"general.architecture": architecture, f"{architecture}.context_length": 512}
    return Metadata({**general, "tokenizer.ggml.model": kind, **ours})


def written(values: Metadata) -> Tokenizer:
    with TemporaryDirectory() as directory:
        write_tokenizer(values, 512, Path(directory))
        return Tokenizer.from_file(str(Path(directory, "tokenizer.json")))


def sentencepiece_values(**more: Any) -> dict[str, Any]:
    """Special tokens, bytes, and pieces whose scores fall in the order in which they were learned."""
    trained = Tokenizer(BPE())
    texts = [text.replace(" ", SPACE) for text in TRAINING]
    trained.train_from_iterator(texts, BpeTrainer(vocab_size=200, show_progress=False))
    vocabulary = trained.get_vocab()
    pieces = sorted(vocabulary, key=lambda piece: vocabulary[piece])
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 2, *[TokenType.BYTE] * 256, *[TokenType.NORMAL] * len(pieces)]
    scores = [0.0] * 259 + [-float(number) for number in range(len(pieces))]
    ids = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return {"tokens": tokens, "scores": scores, "token_type": list(map(int, types)), **ids, **more}


def best_pairs(text: str, tokens: Sequence[str], scores: Sequence[float]) -> list[int]:
    """llama.cpp's way: the best-scored pair of neighbours is joined until there is none, then bytes are spelled.

    Source: llama.cpp, src/llama-vocab.cpp, `llm_tokenizer_spm_session`.
    """
    ids = {token: number for number, token in enumerate(tokens)}
    symbols = list(text)
    while True:
        pairs = [(scores[ids[a + b]], -at) for at, (a, b) in enumerate(pairwise(symbols)) if a + b in ids]
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return [
        number
        for symbol in symbols
        for number in ([ids[symbol]] if symbol in ids else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()])
    ]


TEXTS = st.text(st.sampled_from("the quickbrownfxjmpsvlazydg ïé,2024:üßö你🙂\n"), max_size=40)


@settings(max_examples=60, deadline=None)
@given(text=TEXTS, has_prefix=st.booleans())
def test_a_sentencepiece_vocabulary_encodes_as_llama_cpp(text: str, has_prefix: bool) -> None:
    values = sentencepiece_values(add_space_prefix=has_prefix, add_bos_token=False)
    tokenizer = written(metadata("llama", **values))
    spelled = (SPACE if has_prefix and text else "") + text.replace(" ", SPACE)
    encoded = tokenizer.encode(text)
    assert encoded.ids == best_pairs(spelled, values["tokens"], values["scores"])
    assert tokenizer.decode(encoded.ids) == text


def test_gemmas_runs_of_spaces_are_pieces_and_ids_order_its_merges() -> None:
    values = sentencepiece_values(add_space_prefix=False)
    values["tokens"] += ["  ", "\n\n"]
    values["token_type"] += [int(TokenType.USER_DEFINED)] * 2
    # Scores that say nothing about the order.
    values["scores"] = [-1000.0] * len(values["tokens"])
    tokenizer = written(metadata("llama", "gemma3", **values))
    num_tokens = len(values["tokens"])
    pieces = [*values["tokens"][:-2], SPACE * 2, "\n\n"]
    expected = best_pairs(f"the{SPACE}quick{SPACE}fox", pieces, [-float(number) for number in range(num_tokens)])
    assert tokenizer.encode("the quick fox").ids == [1, *expected]
    assert tokenizer.encode("  ").ids == [1, num_tokens - 2]
    assert tokenizer.encode("\n\n").ids == [1, num_tokens - 1]


@pytest.mark.parametrize("architecture", ["gemma3", "llama"])
@pytest.mark.parametrize("has_prefix", [False, True])
def test_a_longer_run_of_spaces_begins_with_the_longest_that_is_a_piece(architecture: str, has_prefix: bool) -> None:
    values = sentencepiece_values(add_space_prefix=has_prefix, add_bos_token=False)
    first = len(values["tokens"])
    longest = 5
    space = " " if architecture == "gemma3" else SPACE
    values["tokens"] += [space * length for length in range(2, longest + 1)]
    values["token_type"] += [int(TokenType.USER_DEFINED)] * (longest - 1)
    values["scores"] += [0.0] * (longest - 1)
    tokenizer, one = written(metadata("llama", architecture, **values)), values["tokens"].index(SPACE)
    for length in range(1, 3 * longest):
        num_spaces = length + has_prefix
        rest = num_spaces % longest
        ends = [] if rest == 0 else [one] if rest == 1 else [first + rest - 2]
        expected = [first + longest - 2] * (num_spaces // longest) + ends
        assert tokenizer.encode(" " * length).ids == expected
        assert tokenizer.decode(expected) == " " * length


@pytest.mark.parametrize("architecture", ["gemma3", "llama"])
@pytest.mark.parametrize("lengths", [(3, 7), (2, 4, 8), (2, 3, 5)])
@pytest.mark.parametrize("is_listed", [False, True])
def test_runs_of_spaces_are_found_from_the_longest_to_the_shortest(
    architecture: str, lengths: tuple[int, ...], is_listed: bool
) -> None:
    values = sentencepiece_values(add_space_prefix=False, add_bos_token=False)
    first, one = len(values["tokens"]), values["tokens"].index(SPACE)
    # SentencePiece's model alone says nothing of their kind, but gives them a score of 0; merges have less.
    values["tokens"] += [(" " if is_listed else SPACE) * length for length in lengths]
    values["token_type"] += [int(TokenType.USER_DEFINED if is_listed else TokenType.NORMAL)] * len(lengths)
    values["scores"] = [score - 1 for score in values["scores"]] + [-1000.0 if is_listed else 0.0] * len(lengths)
    tokenizer = written(metadata("llama", architecture, **values))
    known = lengths if is_listed or 2 in lengths else ()
    for length in range(1, 40):
        expected, rest = [], length
        for each in sorted(known, reverse=True):
            expected += [first + lengths.index(each)] * (rest // each)
            rest %= each
        text = " " * length
        assert tokenizer.encode(text).ids == [*expected, *[one] * rest]
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def byte_level_values(**more: Any) -> dict[str, Any]:
    model = json.loads(tiny_tokenizer().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    types = [int(TokenType.CONTROL)] * 3 + [int(TokenType.NORMAL)] * (len(tokens) - 3)
    merges = [" ".join(merge) for merge in model["merges"]]
    return {"tokens": tokens, "merges": merges, "token_type": types, "bos_token_id": 1, "eos_token_id": 2, **more}


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS.keys() & GGUF_PRE_TOKENIZER_SPLITS.keys()))
def test_texts_are_split_by_the_expression_of_the_models_tokenizer(name: str) -> None:
    parts = PRE_TOKENIZERS[name]["pretokenizers"]
    assert [part["pattern"]["Regex"] for part in parts[:-1]] == [GGUF_PRE_TOKENIZER_SPLITS[name]]


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_pre_tokenizer_loads_and_loses_nothing(name: str) -> None:
    text = "It's 12345 naïve 你好 test!! \r\n\n  x"
    tokenizer = written(metadata("gpt2", **byte_level_values(pre=name, add_bos_token=False)))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"pre": "qwen2"}, []),
        ({"pre": "llama-bpe"}, [1]),
        ({"pre": "llama-bpe", "add_bos_token": False}, []),
        ({"pre": "qwen2", "add_bos_token": True}, [1]),
    ],
)
def test_a_text_begins_as_the_file_says_or_else_as_its_kind_does(more: Mapping[str, Any], expected: list[int]) -> None:
    encoded = written(metadata("gpt2", **byte_level_values(**more))).encode("dog").ids
    assert [token_id for token_id in encoded if token_id < 3] == expected


def test_all_tokens_that_end_a_turn_end_a_text() -> None:
    assert end_token_ids(metadata("gpt2", **byte_level_values())) == [2]
    assert end_token_ids(metadata("gpt2", **byte_level_values(eot_token_id=0, eom_token_id=2))) == [2, 0]
    # Older files do not name the token.
    assert end_token_ids(metadata("gpt2", **byte_level_values(eos_token_id=0))) == [0, 2]


def test_gpt_oss_goes_on_after_the_end_of_a_message() -> None:
    values = byte_level_values(eos_token_id=0, eot_token_id=2)
    values["tokens"][:4] = ["<|return|>", "<|call|>", "<|end|>", "x"]
    assert end_token_ids(metadata("gpt2", **values)) == [0, 1]
    values["tokens"][1] = "<|start|>"
    assert end_token_ids(metadata("gpt2", **values)) == [0, 2]


def test_a_control_token_of_any_characters_is_one_token() -> None:
    values = byte_level_values()
    values["tokens"][0] = "<｜begin▁of▁sentence｜>"
    assert written(metadata("gpt2", **values)).encode("<｜begin▁of▁sentence｜>").ids == [0]


@pytest.mark.parametrize(
    ("kind", "values", "problem"),
    [
        ("bert", byte_level_values(), "model 'bert', which is not supported; supported: gpt2, llama"),
        ("gpt2", byte_level_values(merges=[]), "lacks tokenizer.ggml.merges"),
        ("gpt2", byte_level_values(merges=["no pe"]), r"a merge that makes no token: \['no', 'pe'\]"),
        ("gpt2", byte_level_values(tokens=["a"] * 513), "has 513 tokens, but embeddings of 512"),
        ("gpt2", byte_level_values(eos_token_id=420), "has tokenizer.ggml.eos_token_id 420, but only 420 tokens"),
        ("llama", sentencepiece_values(scores=[1.0]), "lacks tokenizer.ggml.scores, a number for each token"),
    ],
)
def test_a_vocabulary_that_cannot_be_used_is_named(
    tmp_path: Path, kind: str, values: Mapping[str, Any], problem: str
) -> None:
    with pytest.raises(UnsupportedGgufError, match=problem):
        write_tokenizer(metadata(kind, **values), 512, tmp_path)
