"""How byte-level vocabularies split a text before they merge: `tokenizer.ggml.pre`, as tokenizer.json says it.

Source: llama.cpp, src/llama-vocab.cpp (`llm_tokenizer_bpe`, `llama_vocab::impl::load`), with the expressions that its
comments quote from the models' own tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.model_files.tiktoken_vocabulary import WORDS

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_MARKS}{_END}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_MARKS}{_END}"
_QWEN35 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_END}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = r"[^\r\n\p{L}\p{N}]?"
_GPT4O = (
    rf"{_CASED}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_CASED}{_UPPER}+{_LOWER}*{_CONTRACTION}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_END}"
)
_TEKKEN = rf"{_CASED}{_UPPER}*{_LOWER}+|{_CASED}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_END}"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    + _END,
)
_GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def _sequence(*parts: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(parts)}


def _split(*expressions: str) -> dict[str, Any]:
    """Splits by one expression after the other, and then spells bytes."""
    splits = [
        {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
        for expression in expressions
    ]
    return _sequence(*splits, _BYTES)


_DIGITS = _sequence({"type": "Digits", "individual_digits": True}, _GPT2)

PRE_TOKENIZERS: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("gpt-2", "gpt2"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), _DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), _split(_LLAMA3)),
    **dict.fromkeys(("glm4", "chatglm-bpe", "dbrx", "smaug-bpe"), _split(_LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), _split(_QWEN2)),
    "qwen35": _split(_QWEN35),
    **dict.fromkeys(("gpt-4o", "llama4"), _split(_GPT4O)),
    "tekken": _split(_TEKKEN),
    **dict.fromkeys(("deepseek-v3", "deepseek-r1"), _split(*_DEEPSEEK3)),
    "kimi-k2": _split(WORDS),
}
"""Pre-tokenizers by GGUF's name."""

UNKNOWN_PRE_TOKENIZER: Mapping[str, Any] = _GPT2
"""What is used for all others, with a warning."""

IGNORES_MERGES = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken"})
"""Pre-tokenizers that take a whole piece that is a token, whether or not merges lead to it."""

ADDS_BOS = IGNORES_MERGES
"""Pre-tokenizers that begin a text with the token of that name, where a file does not say."""
