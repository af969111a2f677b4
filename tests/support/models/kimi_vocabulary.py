"""A small vocabulary in Kimi's form: `tiktoken.model` and tokenizer_config.json, without tokenizer.json."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from shared.model_files.missing_files import TIKTOKEN
from shared.model_files.model_dir import TOKENIZER_CONFIG
from shared.model_files.tiktoken_vocabulary import WORDS
from tests.support.tokenizer.many_tokenizers import CORPUS, plain_bytes, split

# The places of the special tokens after the others, as Kimi K2 has them, and whether each is special.
SPECIAL_TOKENS = {
    "[BOS]": (0, True),
    "[EOS]": (1, True),
    "<|im_end|>": (2, True),
    "<|im_user|>": (3, True),
    "<|im_assistant|>": (4, True),
    "<|im_system|>": (10, True),
    "<|tool_calls_section_begin|>": (11, False),
    "<|tool_calls_section_end|>": (12, False),
    "<|tool_call_begin|>": (13, False),
    "<|tool_call_argument_begin|>": (14, False),
    "<|tool_call_end|>": (15, False),
    "<|im_middle|>": (17, True),
    "<think>": (22, False),
    "</think>": (23, False),
    "[UNK]": (254, True),
    "[PAD]": (255, True),
}
_FLAGS = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}


def trained_ranks(texts: Iterable[str] = CORPUS, *, size: int = 600) -> dict[bytes, int]:
    """The ranks of a vocabulary that is trained on texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split(WORDS), plain_bytes()])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    byte_of = {character: value for value, character in bytes_to_unicode().items()}
    vocabulary = {bytes(map(byte_of.__getitem__, text)): rank for text, rank in tokenizer.get_vocab().items()}
    return dict(sorted(vocabulary.items(), key=lambda item: item[1]))


def write_ranks(path: Path, ranks: Mapping[bytes, int]) -> None:
    """Write a `tiktoken.model`."""
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    path.write_text("".join(lines), encoding="ascii")


def kimi_config(num_tokens: int) -> dict[str, Any]:
    """The content of the tokenizer_config.json beside that many tokens."""
    return {
        "added_tokens_decoder": {
            str(num_tokens + place): {"content": text, "special": is_special, **_FLAGS}
            for text, (place, is_special) in SPECIAL_TOKENS.items()
        },
        "additional_special_tokens": [
            "<|im_end|>",
            "<|im_user|>",
            "<|im_assistant|>",
            "<|im_system|>",
            "<|im_middle|>",
        ],
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    }


def write_kimi_vocabulary(directory: Path, ranks: Mapping[bytes, int] | None = None) -> None:
    """Write both files; the remote code that the configuration names fails if it runs."""
    ranks = trained_ranks() if ranks is None else ranks
    write_ranks(directory / TIKTOKEN, ranks)
    (directory / TOKENIZER_CONFIG).write_text(json.dumps(kimi_config(len(ranks))), encoding="utf-8")
    (directory / "tokenization_kimi.py").write_text("raise AssertionError('remote code ran')", encoding="utf-8")
