"""Which of transformers' tokenizer classes a model has, and what that class replaces in tokenizer.json.

Importing transformers is most of a start, and of its classes the families that are served have six: which one, and what
it makes of the files, are the tables here. What they do not have is left to the library itself.

Source: transformers 5.23, `AutoTokenizer.from_pretrained` in models/auto/tokenization_auto.py, `TokenizersBackend` in
tokenization_utils_tokenizers.py, and tokenization_{llama,gpt2,qwen2,qwen3_5,gemma}.py under models.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from shared.model_files.added_tokens import special_token_texts, tokens_to_add
from shared.model_files.model_dir import TokenizerFiles

PLAIN = "TokenizersBackend"
"""The class that takes tokenizer.json as it is."""

# The plain class, and bases without a vocabulary of their own in its place; as in all names here, without `Fast`.
_PLAIN_NAMES = (PLAIN, "PreTrainedTokenizer", "PythonBackend")
_LLAMA, _GPT2, _QWEN2, _QWEN3_5, _GEMMA = (
    *("LlamaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer"),
    *("Qwen3_5Tokenizer", "GemmaTokenizer"),
)

# The class that transformers has for a type; None if it only goes by the class that files name.
_TYPE_TO_CLASS: Mapping[str, str | None] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "gpt_oss", "kimi_k2", "llama")),
    **dict.fromkeys(("glm4v_moe_text", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text")),
    **dict.fromkeys(("glm4_moe", "glm4_moe_lite", "glm4v_moe", "internlm3", "iquestcoder", "kimi_k25"), PLAIN),
    **dict.fromkeys(("ministral", "ministral3", "mistral", "mistral3", "mixtral"), PLAIN),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text", "shieldgemma2"), _GEMMA),
    **dict.fromkeys(("qwen2", "qwen2_vl", "qwen2_5_vl"), _QWEN2),
    **dict.fromkeys(("qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe"), _QWEN2),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _QWEN3_5),
}
# Types for which it takes its own class whatever files name.
_TYPES_NAMED_WRONGLY = ("qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text")

# What transformers reads and these tables do not have.
_OTHER_FIELDS = ("fast_tokenizer_files", "fix_mistral_regex")


class UnknownClassError(Exception):
    """What a class makes of the files is not in the tables; the message names the class or the field."""


class OwnClassError(Exception):
    """The class is code in the model's directory, which is not run; the message names it."""


@dataclass(frozen=True, slots=True)
class _Class:
    """What a class replaces in tokenizer.json: all but the vocabulary, its merges, and what is added around a text."""

    special_tokens: Mapping[str, str | None]
    """Tokens that it has where no file says otherwise."""
    parts: Callable[[Mapping[str, Any], Mapping[str, str]], dict[str, Any]]
    """The parts of a tokenizer.json, by tokenizer_config.json and the special tokens; of the model its options."""
    resets_flags: bool = False
    """Whether special tokens lose the flags that files give them."""


def class_name(config: Mapping[str, Any], tokenizer_config: Mapping[str, Any], source: str) -> str:
    """The class that transformers takes, without `Fast`; `PLAIN` for the plain one under any of its names.

    Args:
        config: The content of config.json.
        tokenizer_config: The content of tokenizer_config.json.
        source: tokenizer.json.

    Raises:
        UnknownClassError: only transformers can tell, or only its class can read the files.
        OwnClassError: the class is the model's own.
    """
    model_type = config.get("model_type")
    if model_type and model_type not in _TYPE_TO_CLASS:
        raise UnknownClassError(f"model_type {model_type}")
    if unknown := [name for name in _OTHER_FIELDS if tokenizer_config.get(name)]:
        raise UnknownClassError(unknown[0])
    registered = _TYPE_TO_CLASS[model_type] if model_type else None
    named = tokenizer_config.get("tokenizer_class") or config.get("tokenizer_class")
    named = named and str(named).removesuffix("Fast")
    if own := _own_class(tokenizer_config):
        name = _class_beside_code(own, registered, named)
    elif named is None or model_type in _TYPES_NAMED_WRONGLY:
        name = registered or PLAIN
    elif registered == PLAIN or (named == _LLAMA and '"ByteLevel"' in source):
        # Llama's class is for vocabularies of SentencePiece, and files of others name it too.
        name = PLAIN
    else:
        name = named
    if name in _PLAIN_NAMES:
        return PLAIN
    if name not in _CLASSES:
        raise UnknownClassError(name)
    return name


def _own_class(tokenizer_config: Mapping[str, Any]) -> str | None:
    """The class beside the model's files, as `MODULE.CLASS`."""
    classes = tokenizer_config.get("auto_map")
    if isinstance(classes, dict):
        classes = classes.get("AutoTokenizer")
    if not classes:
        return None
    return next((str(name) for name in classes if name), None) if isinstance(classes, list) else str(classes)


def _class_beside_code(own: str, registered: str | None, named: str | None) -> str:
    """The class of a model whose own one is not run."""
    is_own = named is None or own.rpartition(".")[2].removesuffix("Fast") == named
    if named is not None and not is_own:
        return named
    if registered is None and named not in _CLASSES:
        raise OwnClassError(own)
    if named is None:
        return registered or PLAIN
    return named if named in _CLASSES else PLAIN


def make_tokenizer(name: str, files: TokenizerFiles) -> tuple[Tokenizer, dict[str, str]]:
    """What a class makes of the contents of its files.

    Returns:
        The tokenizer, and the texts of the special tokens that have names.

    Raises:
        UnknownClassError: the vocabulary is not of the kind that the class has.
        Exception: a content is not as its file must be; the library raises bare exceptions.
    """
    own_class, content = _CLASSES.get(name), files.content
    source, tokenizer_config = files.text, files.config
    if own_class is not None:
        tokenizer_config = {**own_class.special_tokens, **tokenizer_config}
    others = (tokenizer_config, files.special_tokens_map)
    named, extra = special_token_texts(*others)
    present = own = content.get("added_tokens") or []
    if own_class is not None:
        present = []
        parts = _parts(own_class, content["model"], tokenizer_config, named)
        source = json.dumps({**content, **parts, "added_tokens": present}, ensure_ascii=False)
    tokenizer = Tokenizer.from_str(source)
    tokenizer.add_tokens([AddedToken(**token) for token in tokens_to_add(own, present, *others, files.added_tokens)])
    if own_class is not None and own_class.resets_flags:
        tokenizer.add_tokens([AddedToken(text, special=True) for text in (*named.values(), *extra)])
    if tokenizer.post_processor is None:
        tokenizer.post_processor = TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])
    tokenizer.encode_special_tokens = tokenizer_config.get("split_special_tokens") is True
    return tokenizer, named


def _parts(
    own_class: _Class, model: Mapping[str, Any], config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> dict[str, Any]:
    if model.get("type") != "BPE":
        raise UnknownClassError(f"a vocabulary of the type {model.get('type')}")
    parts = {"normalizer": None, "pre_tokenizer": None, "decoder": None, **own_class.parts(config, special_tokens)}
    fields = {"type": "BPE", "dropout": None, "unk_token": None, "ignore_merges": False}
    return parts | {"model": {**fields, **parts["model"], "vocab": model["vocab"], "merges": model["merges"]}}


_SPACE = "▁"
_SENTENCEPIECE_DECODERS = (
    {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
)


def _llama(config: Mapping[str, Any], _: Mapping[str, str]) -> dict[str, Any]:
    has_prefix = config.get("add_prefix_space") is not False
    scheme = ("always" if config.get("legacy") else "first") if has_prefix else "never"
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return {
        "pre_tokenizer": {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": scheme, "split": False},
        "decoder": {"type": "Sequence", "decoders": [*_SENTENCEPIECE_DECODERS, *([strip] if has_prefix else [])]},
        "model": {"fuse_unk": True, "byte_fallback": True},
    }


def _gemma(_: Mapping[str, Any], special_tokens: Mapping[str, str]) -> dict[str, Any]:
    pattern = {"String": " "}
    return {
        "normalizer": {"type": "Replace", "pattern": pattern, "content": _SPACE},
        "pre_tokenizer": {"type": "Split", "pattern": pattern, "behavior": "MergedWithPrevious", "invert": False},
        "decoder": {"type": "Sequence", "decoders": [*_SENTENCEPIECE_DECODERS]},
        "model": {"unk_token": str(special_tokens.get("unk_token")), "fuse_unk": True, "byte_fallback": True},
    }


_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
_BYTE_LEVEL_MODEL = {"continuing_subword_prefix": "", "end_of_word_suffix": "", "fuse_unk": False}


def _gpt2(config: Mapping[str, Any], _: Mapping[str, str]) -> dict[str, Any]:
    has_prefix = config.get("add_prefix_space", False)
    if not isinstance(has_prefix, bool):
        raise UnknownClassError(f"add_prefix_space {has_prefix}")
    return {
        "pre_tokenizer": {**_BYTE_LEVEL, "add_prefix_space": has_prefix},
        "decoder": _BYTE_LEVEL,
        "model": {**_BYTE_LEVEL_MODEL, "byte_fallback": False},
    }


def _qwen(regex: str) -> Callable[[Mapping[str, Any], Mapping[str, str]], dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}

    def parts(config: Mapping[str, Any], special_tokens: Mapping[str, str]) -> dict[str, Any]:
        common = _gpt2({"add_prefix_space": config.get("add_prefix_space") is True}, special_tokens)
        parts = [split, {**common["pre_tokenizer"], "use_regex": False}]
        return {
            **common,
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": parts},
        }

    return parts


_END_OF_TEXT = "<|endoftext|>"
_QWEN_TOKENS = {"unk_token": _END_OF_TEXT, "bos_token": None, "eos_token": _END_OF_TEXT, "pad_token": _END_OF_TEXT}

_CLASSES: Mapping[str, _Class] = {
    _LLAMA: _Class({"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}, _llama),
    _GPT2: _Class(dict.fromkeys(("unk_token", "bos_token", "eos_token"), _END_OF_TEXT), _gpt2),
    _QWEN2: _Class(
        _QWEN_TOKENS,
        _qwen(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
            r"|\s+(?!\S)|\s+"
        ),
        resets_flags=True,
    ),
    _QWEN3_5: _Class(
        _QWEN_TOKENS,
        _qwen(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
    ),
    _GEMMA: _Class({f"{name}_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad", "mask")}, _gemma),
}
