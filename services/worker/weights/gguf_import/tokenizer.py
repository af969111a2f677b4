"""Makes tokenizer.json, tokenizer_config.json and the chat template of a GGUF file's vocabulary.

Byte-level vocabularies (GGUF's "gpt2") have their merges in the file. Those of SentencePiece ("llama") have scores,
from which the merges follow: of two pieces that could be merged, the one with the better score comes first.

Sources: llama.cpp, src/llama-vocab.cpp; tokenizers' format of tokenizer.json.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from services.worker.weights.gguf_import.metadata import Metadata, UnsupportedGgufError
from services.worker.weights.gguf_import.pre_tokenizers import (
    ADDS_BOS,
    IGNORES_MERGES,
    PRE_TOKENIZERS,
    UNKNOWN_PRE_TOKENIZER,
)
from shared.model_files.model_dir import CHAT_TEMPLATE, TOKENIZER, TOKENIZER_CONFIG

_BYTE_LEVEL, _SENTENCEPIECE = "gpt2", "llama"
# What `tokenizer.ggml.token_type` says. Source: gguf-py, constants.py, `TokenType`.
_CONTROL, _USER_DEFINED = 3, 4
_NAMES = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token", "unknown": "unk_token"}
# Tokens that end a turn, which older files name nowhere. Source: llama.cpp, src/llama-vocab.cpp, `special_eog_ids`.
_TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|return|>", "<|call|>")
_HARMONY = ("<|return|>", "<|call|>")
# Merges of a piece take time with the square of its length. Published vocabularies have none of more than 128.
_MAX_PIECE_LENGTH = 1024
_SPACE = "\u2581"

logger = logging.getLogger(__name__)


def write_tokenizer(metadata: Metadata, vocab_size: int, result_dir: Path) -> None:
    """Write the files into `result_dir`.

    Args:
        vocab_size: Rows of the embedding.

    Raises:
        UnsupportedGgufError: the vocabulary is missing, malformed, of another kind, or larger than `vocab_size`.
    """
    tokens = _tokens(metadata, vocab_size)
    tokenizer = _tokenizer(metadata, tokens)
    _write_json(result_dir / TOKENIZER, tokenizer)
    special = {
        name: tokens[token_id] for key, name in _NAMES.items() if (token_id := _id(metadata, key, tokens)) is not None
    }
    config = {
        "backend": "tokenizers",
        "tokenizer_class": "TokenizersBackend",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.size("context_length"),
        **special,
    }
    _write_json(result_dir / TOKENIZER_CONFIG, config)
    if template := metadata.token_text("chat_template"):
        (result_dir / CHAT_TEMPLATE).write_text(template, encoding="utf-8")


def end_token_ids(metadata: Metadata) -> list[int]:
    """The tokens that end a generated text: of the end of a text, of a turn and of a message, without repeats."""
    tokens = metadata.token_texts("tokens")
    named = [_id(metadata, name, tokens) for name in ("eos", "eot", "eom")]
    types = metadata.token_numbers("token_type")
    control = {
        token: number for number, (token, kind) in enumerate(zip(tokens, types, strict=False)) if kind == _CONTROL
    }
    listed = [control[text] for text in _TURN_ENDS if text in control]
    if all(text in control for text in _HARMONY):
        # A message's end, after which gpt-oss goes on.
        named = [token_id for token_id in named if token_id != control.get("<|end|>")]
    return list(dict.fromkeys(token_id for token_id in (*named, *listed) if token_id is not None))


def _tokens(metadata: Metadata, vocab_size: int) -> list[str]:
    tokens, types = metadata.token_texts("tokens"), metadata.token_numbers("token_type")
    if not tokens:
        raise UnsupportedGgufError("lacks tokenizer.ggml.tokens, a list of tokens")
    if len(tokens) > vocab_size:
        raise UnsupportedGgufError(f"has {len(tokens)} tokens, but embeddings of {vocab_size}")
    if types and len(types) != len(tokens):
        raise UnsupportedGgufError(f"has {len(tokens)} tokens, but {len(types)} types of tokens")
    return tokens


def _tokenizer(metadata: Metadata, tokens: list[str]) -> dict[str, Any]:
    """The content of tokenizer.json."""
    kind = metadata.token_text("ggml.model")
    if kind == _BYTE_LEVEL:
        parts, adds_bos = _byte_level(metadata, tokens)
    elif kind == _SENTENCEPIECE:
        tokens = _spell_runs(metadata, tokens)
        parts, adds_bos = _sentencepiece(metadata, tokens), True
    else:
        raise UnsupportedGgufError(
            f"has tokenizer.ggml.model {kind!r}, which is not supported; supported: {_BYTE_LEVEL}, {_SENTENCEPIECE}"
        )
    vocabulary = parts["model"]["vocab"]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(_added_tokens(metadata, tokens, vocabulary)),
        "post_processor": _post_processor(metadata, tokens, adds_bos=adds_bos),
        **parts,
    }


def _byte_level(metadata: Metadata, tokens: list[str]) -> tuple[dict[str, Any], bool]:
    name = metadata.token_text("ggml.pre", default="default")
    if name not in PRE_TOKENIZERS:
        logger.warning("unknown pre-tokenizer: texts may be split differently than in training", extra={"kind": name})
    # A token never has a space: byte-level vocabularies spell it otherwise.
    pairs = [merge.split(" ") for merge in metadata.token_texts("merges")]
    if not pairs:
        raise UnsupportedGgufError("lacks tokenizer.ggml.merges, a list of pairs of tokens")
    vocabulary = _vocabulary(tokens)
    if wrong := next((pair for pair in pairs if len(pair) != 2 or "".join(pair) not in vocabulary), None):
        raise UnsupportedGgufError(f"has a merge that makes no token: {wrong!r}")
    decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    model = _bpe(vocabulary, pairs, ignores_merges=name in IGNORES_MERGES)
    pre_tokenizer = PRE_TOKENIZERS.get(name, UNKNOWN_PRE_TOKENIZER)
    parts = {"normalizer": None, "pre_tokenizer": pre_tokenizer, "decoder": decoder, "model": model}
    return parts, name in ADDS_BOS


def _sentencepiece(metadata: Metadata, tokens: list[str]) -> dict[str, Any]:
    """As Llama 2's and Gemma's tokenizer.json: they differ in the space before a text, and in what orders merges."""
    scores = metadata.token_numbers("scores")
    if len(scores) != len(tokens):
        raise UnsupportedGgufError("lacks tokenizer.ggml.scores, a number for each token")
    has_prefix = metadata.token_flag("add_space_prefix", default=True)
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    restored = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    prepend, strip = {"type": "Prepend", "prepend": _SPACE}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    decoders = [restored, {"type": "ByteFallback"}, {"type": "Fuse"}, *([strip] if has_prefix else [])]
    if _is_gemma(metadata):
        # Scores do not follow the order of merges, but ids do.
        scores = [-token_id for token_id in range(len(tokens))]
    scores = _runs_first(metadata, tokens, scores)
    vocabulary = _vocabulary(tokens)
    pairs = [list(pair) for pair in _merges(tokens, scores, vocabulary)]
    unknown = _id(metadata, "unknown", tokens)
    model = _bpe(vocabulary, pairs, unknown=None if unknown is None else tokens[unknown], falls_back=True)
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*([prepend] if has_prefix else []), replaced]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }


def _is_gemma(metadata: Metadata) -> bool:
    return metadata.architecture.startswith("gemma")


def _spell_runs(metadata: Metadata, tokens: list[str]) -> list[str]:
    """The tokens, with runs of spaces spelled as pieces, which are found by merges.

    llama.cpp's converter stores a publisher's own runs as spaces. They stay so, and are found in a text before it is
    split, where llama.cpp writes a space before what follows such a token, and where no shorter runs make some of them.
    """
    lengths = {len(token) for token in tokens if set(token) == {" "}} | {1}
    has_prefix = metadata.token_flag("add_space_prefix", default=True) and not _is_gemma(metadata)
    if has_prefix or max(lengths) > _MAX_PIECE_LENGTH:
        return tokens
    made = {first + second for first in lengths for second in lengths}
    if not lengths <= made | {1}:
        return tokens
    return [_SPACE * len(token) if set(token) == {" "} else token for token in tokens]


def _runs_first(metadata: Metadata, tokens: Sequence[str], scores: Sequence[float]) -> list[float]:
    """The scores, by which runs of spaces that the publisher defined are merged before all else, the longest first.

    A run in a text then grows from its beginning, as in Gemma's own tokenizer.json: 32 spaces are the longest run, of
    31, and one more. As such they are found nowhere: a text has spaces, and a piece what they are replaced by. Those
    that SentencePiece's model alone defines are of no kind of their own in the file, but have its score of 0.
    """
    types, best = metadata.token_numbers("token_type") or [0] * len(tokens), max(scores)
    stored = metadata.token_numbers("scores")
    return [
        best + len(token) if set(token) == {_SPACE} and (kind == _USER_DEFINED or own == 0) else score
        for token, kind, own, score in zip(tokens, types, stored, scores, strict=True)
    ]


def _merges(tokens: Sequence[str], scores: Sequence[float], vocabulary: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Every pair of pieces that makes a piece, the best first; of one piece, the pair with the lowest ids."""
    found = []
    for token, score in zip(tokens, scores, strict=True):
        if len(token) > _MAX_PIECE_LENGTH:
            raise UnsupportedGgufError(f"has a token of {len(token)} characters; at most {_MAX_PIECE_LENGTH} are read")
        for middle in range(1, len(token)):
            left, right = token[:middle], token[middle:]
            if left in vocabulary and right in vocabulary:
                found.append((-score, vocabulary[left], vocabulary[right], left, right))
    return ((left, right) for *_, left, right in sorted(found))


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    vocabulary: dict[str, int] = {}
    for number, token in enumerate(tokens):
        vocabulary.setdefault(token, number)
    return vocabulary


def _bpe(
    vocabulary: Mapping[str, int],
    merges: list[list[str]],
    *,
    unknown: str | None = None,
    falls_back: bool = False,
    ignores_merges: bool = False,
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": falls_back,
        "byte_fallback": falls_back,
        "ignore_merges": ignores_merges,
        "vocab": vocabulary,
        "merges": merges,
    }


def _added_tokens(metadata: Metadata, tokens: Sequence[str], vocabulary: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Tokens that are found in a text before it is split: special ones, and those that the publisher added."""
    for number, kind in enumerate(metadata.token_numbers("token_type")):
        if kind in (_CONTROL, _USER_DEFINED) and vocabulary.get(tokens[number]) == number:
            yield {
                "id": number,
                "content": tokens[number],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind == _CONTROL,
            }


def _post_processor(metadata: Metadata, tokens: Sequence[str], *, adds_bos: bool) -> dict[str, Any]:
    """Adds the tokens that a text begins and ends with."""
    ends = []
    for name, default in (("bos", adds_bos), ("eos", False)):
        token_id = _id(metadata, name, tokens)
        adds = metadata.token_flag(f"add_{name}_token", default=default)
        ends.append(tokens[token_id] if adds and token_id is not None else None)

    def template(*numbers: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for number in numbers:
            special = [{"SpecialToken": {"id": token, "type_id": number}} for token in ends if token is not None]
            sequence = {"Sequence": {"id": "AB"[number], "type_id": number}}
            found += [*special[: ends[0] is not None], sequence, *special[ends[0] is not None :]]
        return found

    used = {token: tokens.index(token) for token in ends if token is not None}
    special = {token: {"id": token, "ids": [number], "tokens": [token]} for token, number in used.items()}
    return {"type": "TemplateProcessing", "single": template(0), "pair": template(0, 1), "special_tokens": special}


def _id(metadata: Metadata, name: str, tokens: Sequence[str]) -> int | None:
    token_id = metadata.token_id(name)
    if token_id is not None and token_id >= len(tokens):
        raise UnsupportedGgufError(f"has tokenizer.ggml.{name}_token_id {token_id}, but only {len(tokens)} tokens")
    return token_id


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, ensure_ascii=False, indent=2), encoding="utf-8")
