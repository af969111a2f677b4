"""Kimi's vocabulary, `tiktoken.model`, as a tokenizer.json, which every service reads. The model's own code never runs.

A line of `tiktoken.model` is a token in base64 and its rank, which is also its id. tiktoken joins the two neighbours
whose bytes together are the token of the lowest rank; tokenizer.json has pairs instead, the first of which is joined
first. The pair that becomes a token is what joining by lower ranks leaves of its bytes. Where that leaves more than two
parts, all pairs are listed that have the token's bytes: ranks that training has given never need it.

The 256 ids after these are of added tokens: those that tokenizer_config.json names, and `<|reserved_token_ID|>`.

One thing differs from Kimi's own code on purpose: that cuts a text every 400 000 characters, and every 25 000 within a
run of characters that are all whitespace or all something else, since tiktoken once could not take longer ones. A token
never spans such a cut there; here texts are encoded whole.

Source: `TikTokenTokenizer` in tokenization_kimi.py of moonshotai/Kimi-K2-Instruct; tiktoken 0.14, src/lib.rs,
`byte_pair_encode`.
"""

from __future__ import annotations

import base64
import binascii
import json
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shared.model_files.missing_files import TIKTOKEN
from shared.model_files.model_dir import TOKENIZER, TOKENIZER_CONFIG, ModelDirectoryError, read_json, refuse_pointer

# Characters of the beginnings and ends of words, and what English adds to them.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
WORDS = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""A regex whose matches are the words of a text, each encoded apart."""
NUM_SPECIAL_TOKENS = 256

_TOKENIZER_CLASS = "TikTokenTokenizer"
# Far more than any vocabulary has, so that another kind of file is refused before it fills the memory.
_MAX_TOKENS = 1 << 20
_MAX_LINE_BYTES = 4096
# Above the rank of every token.
_NO_RANK = _MAX_TOKENS
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
# The characters that stand for bytes which are not printable; all others stand for themselves.
# Source: `bytes_to_unicode` in encoder.py of openai/gpt-2.
_PRINTABLE = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
_BYTE_LEVEL = {value: 256 + index for index, value in enumerate(sorted(set(range(256)) - _PRINTABLE))}


def convert_vocabulary(model_dir: Path) -> bool:
    """Write tokenizer.json of a directory that has tiktoken.model instead.

    It appears at once and whole, and is the same whoever writes it.

    Returns:
        Whether it was written: not if there is one already, or no tiktoken.model.

    Raises:
        ModelDirectoryError: a file is malformed, the vocabulary is not Kimi's, or the directory cannot be written to;
            the message names the file, and of tiktoken.model the line.
    """
    path = model_dir / TOKENIZER
    if path.exists() or not (model_dir / TIKTOKEN).exists():
        return False
    content = json.dumps(tokenizer_of(model_dir), ensure_ascii=False)
    # A name of its own, since another process may write the same file.
    part = model_dir / f".{TOKENIZER}.{secrets.token_hex(8)}.part"
    try:
        try:
            part.write_text(content, encoding="utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise ModelDirectoryError(f"{path}: cannot be written, to convert {TIKTOKEN}: {error.strerror}") from error
    return True


def tokenizer_of(model_dir: Path) -> dict[str, Any]:
    """The content of the tokenizer.json.

    Raises:
        ModelDirectoryError: as `convert_vocabulary`.
    """
    config = read_json(model_dir, TOKENIZER_CONFIG)
    if (name := config.get("tokenizer_class")) != _TOKENIZER_CLASS:
        raise ModelDirectoryError(
            f"{model_dir / TOKENIZER_CONFIG}: tokenizer_class is {name!r}: only {TIKTOKEN} of {_TOKENIZER_CLASS}, "
            "which is Kimi's, can be converted"
        )
    ranks = _read_ranks(model_dir / TIKTOKEN)
    added = _added_tokens(model_dir / TOKENIZER_CONFIG, config, ranks)
    text_of = {token: token.decode("latin-1").translate(_BYTE_LEVEL) for token in ranks}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            # A word that is a token is that token, whatever its parts are.
            "ignore_merges": True,
            "vocab": {text_of[token]: rank for token, rank in ranks.items()},
            "merges": [[text_of[left], text_of[right]] for left, right in merges_of(ranks)],
        },
    }


def merges_of(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """The pairs that become tokens, in the order of the tokens' ranks; `ranks` is in that order."""
    for token, rank in ranks.items():
        parts = _parts(token, rank, ranks)
        if len(parts) == 2:
            yield parts[0], parts[1]
        elif len(parts) > 2:
            pairs = ((token[:end], token[end:]) for end in range(1, len(token)))
            yield from (pair for pair in pairs if pair[0] in ranks and pair[1] in ranks)


def _parts(token: bytes, rank: int, ranks: Mapping[bytes, int]) -> list[bytes]:
    """What joining by ranks below `rank` leaves of a token."""
    parts = [token[start : start + 1] for start in range(len(token))]
    if len(parts) < 3:
        return parts
    get = ranks.get
    # The rank of each part with the next one.
    joined = [get(token[start : start + 2], _NO_RANK) for start in range(len(token) - 1)]
    while (lowest := min(joined)) < rank:
        at = joined.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            break
        del joined[at]
        if at:
            joined[at - 1] = get(parts[at - 1] + parts[at], _NO_RANK)
        if at < len(joined):
            joined[at] = get(parts[at] + parts[at + 1], _NO_RANK)
    return parts


def _read_ranks(path: Path) -> dict[bytes, int]:
    """The tokens in the order of their ranks, which are 0, 1, 2, ...; all single bytes are among them."""
    refuse_pointer(path)
    ranks: dict[bytes, int] = {}
    line_of_rank: dict[int, int] = {}
    try:
        for number, line in _lines(path):
            token, rank = _read_line(line, f"{path}, line {number}")
            if token in ranks:
                first = line_of_rank[ranks[token]]
                raise ModelDirectoryError(f"{path}, line {number}: the token of line {first} again")
            if (first := line_of_rank.setdefault(rank, number)) != number:
                raise ModelDirectoryError(f"{path}, line {number}: the rank of line {first} again: {rank}")
            ranks[token] = rank
    except OSError as error:
        raise ModelDirectoryError(f"{path}: {error.strerror or error}") from error
    if (missing := next((rank for rank in range(len(ranks)) if rank not in line_of_rank), None)) is not None:
        raise ModelDirectoryError(f"{path}: no token has rank {missing}, although there are {len(ranks)} tokens")
    for value in range(256):
        if bytes([value]) not in ranks:
            raise ModelDirectoryError(f"{path}: the byte {value:#04x} is no token, so not every text can be encoded")
    return dict(sorted(ranks.items(), key=lambda item: item[1]))


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not empty, with their numbers from 1."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(_MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > _MAX_LINE_BYTES:
                raise ModelDirectoryError(f"{path}, line {number}: longer than {_MAX_LINE_BYTES} bytes")
            if number > _MAX_TOKENS:
                raise ModelDirectoryError(f"{path}: more than {_MAX_TOKENS} lines")
            if line := line.strip():
                yield number, line


def _read_line(line: bytes, place: str) -> tuple[bytes, int]:
    encoded, _, rank = line.partition(b" ")
    try:
        token = base64.b64decode(encoded, validate=True)
    except binascii.Error as error:
        raise ModelDirectoryError(f"{place}: no token in base64: {error}") from None
    if not token:
        raise ModelDirectoryError(f"{place}: the token is empty")
    # Not int() alone, which takes underscores, signs and other digits too.
    if not (rank.isdigit() and len(rank) <= 9):
        raise ModelDirectoryError(f"{place}: no rank after the token")
    return token, int(rank)


def _added_tokens(path: Path, config: Mapping[str, Any], ranks: Mapping[bytes, int]) -> list[dict[str, Any]]:
    ids = range(len(ranks), len(ranks) + NUM_SPECIAL_TOKENS)
    tokens: dict[int, dict[str, Any]] = {
        token_id: {"content": f"<|reserved_token_{token_id}|>", "special": True} for token_id in ids
    }
    listed = config.get("added_tokens_decoder", {})
    if not isinstance(listed, dict):
        raise ModelDirectoryError(f"{path}: added_tokens_decoder is not an object")
    names = {str(token_id): token_id for token_id in ids}
    for name, token in listed.items():
        if name not in names:
            raise ModelDirectoryError(
                f"{path}: added_tokens_decoder has {name!r}: special tokens are {ids[0]} to {ids[-1]}, after the "
                f"{len(ranks)} of {TIKTOKEN}"
            )
        if not isinstance(token, dict) or not _is_text(token.get("content")):
            raise ModelDirectoryError(f"{path}: added_tokens_decoder: {name} has no text as its content")
        tokens[names[name]] = token
    id_of: dict[str, int] = {}
    for token_id, token in tokens.items():
        content = token["content"]
        first = ranks.get(content.encode(), id_of.setdefault(content, token_id))
        if first != token_id:
            raise ModelDirectoryError(f"{path}: added_tokens_decoder: {token_id} is {content!r}, as {first} is")
    return [
        {"id": token_id, "content": token["content"], **{flag: bool(token.get(flag, False)) for flag in _FLAGS}}
        for token_id, token in tokens.items()
    ]


def _is_text(value: object) -> bool:
    """Whether it is a text that is not empty and that UTF-8 can encode."""
    return isinstance(value, str) and value != "" and value.encode(errors="ignore").decode() == value
