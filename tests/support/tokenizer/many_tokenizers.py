"""Small trained tokenizers with the structures of all known models, and texts that distinguish them."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from functools import cache
from typing import Any

from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from shared.model_files.tiktoken_vocabulary import WORDS as KIMI
from tests.support.models.tiny_tokenizer import tiny_tokenizer

REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + REST
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + REST
GPT_OSS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MISTRAL = GPT_OSS.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")
# As in its file: with literal line ends.
DEEPSEEK_3 = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)

UNMARK: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]

ASCII = [*string.ascii_letters, *string.digits, *string.punctuation]

CORPUS = [
    "The quick brown fox doesn't jump; I'LL see, it'S ok.  Two  spaces\n\nand lines,\n  indented.\r\nx=y+1; 12345 6.7",
    "Привет, мир! 你好，世界。\n今天。ひらがな、カタカナ！ 한국어? café café 😀 <think>x</think> ▁a ▁▁b a.b/c_d",  # noqa: RUF001
] * 3


def split(rule: str) -> pre_tokenizers.PreTokenizer:
    """A stage that splits off the matches of a regular expression as words."""
    return pre_tokenizers.Split(Regex(rule), "isolated")


def byte_level(*stages: pre_tokenizers.PreTokenizer) -> Tokenizer:
    """A trained byte-level tokenizer with these pre-tokenizer stages."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(stages))
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>"), AddedToken("  ")])
    return tokenizer


def sentencepiece(*, is_legacy: bool = False, **marking: Any) -> Tokenizer:
    """A trained tokenizer that marks spaces, with a normalizer (`is_legacy`) or a pre-tokenizer."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"], initial_alphabet=ASCII, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    if is_legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        # A pre-tokenizer cannot be unset in place.
        without = json.loads(tokenizer.to_str()) | {"pre_tokenizer": None}
        tokenizer = Tokenizer.from_str(json.dumps(without))
        tokenizer.decoder = llama_2_decoder()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(**marking)
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(**_without_split(marking))])
    tokenizer.add_tokens([AddedToken("[b]", normalized=False), AddedToken("[c]")])
    return tokenizer


def llama_2_decoder() -> decoders.Decoder:
    """Marks become spaces, byte tokens characters, and the first space is dropped."""
    return decoders.Sequence([*UNMARK, decoders.Strip(" ", 1, 0)])


def with_byte_tokens(decoder: decoders.Decoder, pieces: Sequence[str]) -> Tokenizer:
    """A tokenizer of these pieces and of all bytes, in which what is no piece is spelled; its special token is <s>."""
    tokens = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.decoder = decoder
    return tokenizer


def spell(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    """The ids of tokens, and of the byte tokens of what is none."""
    vocabulary = tokenizer.get_vocab()
    ids: list[int] = []
    for token in tokens:
        known = vocabulary.get(token)
        ids += [vocabulary[f"<0x{byte:02X}>"] for byte in token.encode()] if known is None else [known]
    return ids


def _without_split(marking: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in marking.items() if name != "split"}


def with_nfc(tokenizer: Tokenizer) -> Tokenizer:
    """Add NFC normalization to the tokenizer, in place, and return it."""
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def plain_bytes(*, use_regex: bool = False) -> pre_tokenizers.PreTokenizer:
    """The last stage of byte-level tokenizers; with `use_regex` it also splits words."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


@cache
def tokenizers() -> dict[str, Tokenizer]:
    """Small tokenizers with the structures of known models, by name."""
    cjk = "[一-龥぀-ゟ゠-ヿ]+"  # noqa: RUF001
    return {
        "tiny": tiny_tokenizer(),
        "gpt-2": byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True)),
        "smollm": byte_level(pre_tokenizers.Digits(individual_digits=True), plain_bytes(use_regex=True)),
        "llama-3": byte_level(split(LLAMA_3), plain_bytes()),
        "qwen": with_nfc(byte_level(split(QWEN), plain_bytes())),
        "gpt-oss": byte_level(split(GPT_OSS), plain_bytes()),
        "kimi": byte_level(split(KIMI), plain_bytes()),
        "mistral": byte_level(split(MISTRAL), plain_bytes()),
        "deepseek-3": byte_level(split(r"\p{N}{1,3}"), split(cjk), split(DEEPSEEK_3), plain_bytes()),
        "llama-2": sentencepiece(is_legacy=True),
        "metaspace": sentencepiece(prepend_scheme="first", split=False),
        "metaspace-always": sentencepiece(prepend_scheme="always", split=False),
        "metaspace-words": sentencepiece(prepend_scheme="first", split=True),
    }


NAMES = ["tiny", "gpt-2", "smollm", "llama-3", "qwen", "gpt-oss", "kimi", "mistral", "deepseek-3"]
MARKING_NAMES = ["llama-2", "metaspace", "metaspace-always", "metaspace-words"]
ALL_NAMES = [*NAMES, *MARKING_NAMES]

# Pieces of text that tokenizers treat differently.
BITS = [
    *["a", "Z", "the", " the", "é", "и", "你", "好", "カ", "が", "가", "ʰ", "1", "23", "٣", "½"],
    *[" ", "  ", "\n", "\r", "\r\n", "\n\n", "\t", "\u00a0", "\u3000", "\u2028", "\x1c", "\x85", "\u200b", "\u180e"],
    *["'", "'s", "'LL", ".", ",", "-", "/", "_", "<", ">", "=", "。", "，", "！", "…", "€", "\x01", "\u0301", "\u3099"],  # noqa: RUF001
    *["<think>", "</think>", "<|im_end|>", "<thi", "[b]", "[c]", "▁", "😀", "\U0001f469\u200d\U0001f467"],
]
TEXTS = st.lists(st.sampled_from(BITS), max_size=12).map("".join) | st.text(max_size=12)
