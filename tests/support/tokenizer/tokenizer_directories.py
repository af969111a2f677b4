"""Directories whose tokens and chat templates are in different files, for comparison with transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from shared.model_files.model_dir import (
    ADDED_TOKENS,
    CHAT_TEMPLATE,
    CONFIG,
    SPECIAL_TOKENS_MAP,
    TOKENIZER,
    TOKENIZER_CONFIG,
)
from tests.support.models.tiny_tokenizer import ENDOFTEXT, IM_END, IM_START, tiny_tokenizer
from tests.support.tokenizer.many_tokenizers import tokenizers

# Writes every special token that it is given, and the names of the tools.
CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ '[' ~ m.role ~ ']' ~ m.content ~ eos_token }}{% endfor %}"
    "{{ image_token }}{{ unk_token }}{{ tools | map(attribute='function.name') | join if tools else '' }}"
)
TOOL_USE = "{{ bos_token }}tools:{% for m in messages %}{{ m.content }}{% endfor %}" + "{{ tools | length }}"

Json = dict[str, Any]


@dataclass(frozen=True)
class Directory:
    """The files of a model's directory, as far as a tokenizer reads them; None leaves a file out."""

    tokenizer: Callable[[], Tokenizer] = tiny_tokenizer
    config: Json = field(default_factory=lambda: {"model_type": "llama"})
    tokenizer_config: Json | None = field(default_factory=dict)
    special_tokens_map: Json | None = None
    added_tokens: Json | None = None
    templates: dict[str, str] = field(default_factory=lambda: {CHAT_TEMPLATE: CHAT})

    def write(self, directory: Path) -> Path:
        """Write the files to a new directory, and return it."""
        directory.mkdir()
        self.tokenizer().save(str(directory / TOKENIZER))
        files = {
            CONFIG: self.config,
            TOKENIZER_CONFIG: self.tokenizer_config,
            SPECIAL_TOKENS_MAP: self.special_tokens_map,
            ADDED_TOKENS: self.added_tokens,
        }
        for name, content in files.items():
            if content is not None:
                (directory / name).write_text(json.dumps(content))
        for name, source in self.templates.items():
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_text(source)
        return directory


def token(text: str, **fields: object) -> Json:
    """An added token as files have it; `normalized` and `special` are False."""
    return {"content": text, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, **fields}


def typed(text: str, **fields: object) -> Json:
    """As `token`, with the type that a tokenizer_config.json has."""
    return {"__type": "AddedToken", **token(text, **fields)}


def with_plain_tokens() -> Tokenizer:
    """The tiny tokenizer with added tokens that are not special."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<call>", normalized=False), AddedToken("</call>", rstrip=True)])
    return tokenizer


def without_post_processor() -> Tokenizer:
    """The tiny tokenizer without what adds tokens around a text."""
    content = json.loads(tiny_tokenizer().to_str()) | {"post_processor": None}
    return Tokenizer.from_str(json.dumps(content))


def with_bos() -> Tokenizer:
    """The tiny tokenizer, which begins each text with a token."""
    tokenizer = tiny_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{IM_START} $A {IM_END}", special_tokens=[(IM_START, 1), (IM_END, 2)]
    )
    return tokenizer


def known(name: str, *special: str) -> Callable[[], Tokenizer]:
    """One of `many_tokenizers`, with these special tokens in addition."""

    def make() -> Tokenizer:
        tokenizer = Tokenizer.from_str(tokenizers()[name].to_str())
        tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
        return tokenizer

    return make


_BOS_EOS = {"bos_token": IM_START, "eos_token": IM_END}
_NEW = ["<image>", "<audio>"]
_OTHER = "{{ eos_token }}other{{ bos_token }}"
_DECODER = {
    **{str(i): token(text, special=True) for i, text in enumerate((ENDOFTEXT, IM_START, IM_END))},
    "420": token("<call>", special=True),
    "421": token("</call>"),
    "422": token("<new>", special=True, lstrip=True),
}

TABLE: dict[str, Directory] = {
    "plain": Directory(tokenizer_config=_BOS_EOS),
    "no tokenizer_config": Directory(tokenizer_config=None),
    "no model type": Directory(config={}, tokenizer_config=_BOS_EOS),
    # Where the special tokens are.
    "only in the map": Directory(special_tokens_map=_BOS_EOS),
    "only in the map, as objects": Directory(
        tokenizer_config=None, special_tokens_map={name: token(text) for name, text in _BOS_EOS.items()}
    ),
    "only in the map, new": Directory(special_tokens_map={"bos_token": "<s>", "eos_token": token("</s>", lstrip=True)}),
    "typed objects": Directory(
        tokenizer_config={name: typed(text) for name, text in _BOS_EOS.items()} | {"unk_token": typed("<unk>")}
    ),
    "map against config": Directory(
        tokenizer_config={"bos_token": IM_END, "eos_token": ENDOFTEXT}, special_tokens_map=_BOS_EOS
    ),
    "map without a say": Directory(
        tokenizer_config={"bos_token": IM_END, "added_tokens_decoder": _DECODER}, special_tokens_map=_BOS_EOS
    ),
    "null": Directory(tokenizer_config={"bos_token": None, "eos_token": IM_END, "pad_token": None}),
    "a name of its own": Directory(tokenizer_config=_BOS_EOS | {"image_token": "<image>", "use_token": "x y"}),
    "a name of its own in the map": Directory(special_tokens_map=_BOS_EOS | {"image_token": token("<image>")}),
    # Where the added tokens are.
    "added_tokens.json": Directory(
        with_plain_tokens, tokenizer_config=_BOS_EOS, added_tokens={"<call>": 420, "<x>": 423, "<y>": 422}
    ),
    "added_tokens.json, special": Directory(
        special_tokens_map=_BOS_EOS | {"pad_token": "<pad>"}, added_tokens={"<pad>": 420, "<x>": 421}
    ),
    "added_tokens.json, additional": Directory(
        special_tokens_map=_BOS_EOS | {"additional_special_tokens": ["<x>"]}, added_tokens={"<x>": 420, "<y>": 421}
    ),
    "added_tokens_decoder": Directory(
        with_plain_tokens, tokenizer_config=_BOS_EOS | {"added_tokens_decoder": _DECODER}
    ),
    "added_tokens_decoder against added_tokens.json": Directory(
        tokenizer_config=_BOS_EOS | {"added_tokens_decoder": _DECODER}, added_tokens={"<x>": 420}
    ),
    "added_tokens_decoder with gaps": Directory(
        tokenizer_config={"added_tokens_decoder": {"500": token("<b>", special=True), "450": token("<a>")}}
    ),
    "added_tokens_decoder, less special": Directory(
        tokenizer_config=_BOS_EOS | {"added_tokens_decoder": {"0": token(ENDOFTEXT), "2": token(IM_END)}}
    ),
    "extra list": Directory(tokenizer_config=_BOS_EOS | {"extra_special_tokens": [*_NEW, IM_END]}),
    "extra list of objects": Directory(
        tokenizer_config=_BOS_EOS | {"extra_special_tokens": [typed("<image>"), typed("<audio>", special=True)]}
    ),
    "extra by name": Directory(
        tokenizer_config=_BOS_EOS | {"extra_special_tokens": {"image_token": "<image>", "boi_token": typed("<boi>")}}
    ),
    "extra in both": Directory(
        tokenizer_config={"extra_special_tokens": ["<audio>"]},
        special_tokens_map=_BOS_EOS | {"extra_special_tokens": ["<image>", token("<video>"), "<audio>"]},
    ),
    "extra by name in the map": Directory(
        special_tokens_map=_BOS_EOS | {"extra_special_tokens": {"image_token": "<image>"}}
    ),
    "additional": Directory(tokenizer_config=_BOS_EOS | {"additional_special_tokens": _NEW}),
    "additional in the map": Directory(special_tokens_map=_BOS_EOS | {"additional_special_tokens": _NEW}),
    "additional against extra": Directory(
        tokenizer_config=_BOS_EOS | {"additional_special_tokens": _NEW, "extra_special_tokens": ["<video>"]}
    ),
    "extra that is not special": Directory(
        with_plain_tokens, tokenizer_config=_BOS_EOS | {"extra_special_tokens": ["<call>"], "unk_token": "</call>"}
    ),
    # What is added around a text.
    "add_bos_token": Directory(tokenizer_config=_BOS_EOS | {"add_bos_token": True, "add_eos_token": True}),
    "add_bos_token, nothing else": Directory(
        without_post_processor, tokenizer_config=_BOS_EOS | {"add_bos_token": True, "add_eos_token": True}
    ),
    "add_bos_token false": Directory(
        with_bos, tokenizer_config=_BOS_EOS | {"add_bos_token": False, "add_eos_token": False}
    ),
    # Classes that replace parts of tokenizer.json.
    "LlamaTokenizer of bytes": Directory(tokenizer_config=_BOS_EOS | {"tokenizer_class": "LlamaTokenizer"}),
    "LlamaTokenizer": Directory(
        known("llama-2"),
        tokenizer_config={"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "unk_token": "<unk>"},
        special_tokens_map={"bos_token": "<s>", "eos_token": "</s>"},
    ),
    "LlamaTokenizerFast by config.json": Directory(
        known("llama-2", "<s>", "</s>"), config={"model_type": "llama", "tokenizer_class": "LlamaTokenizerFast"}
    ),
    "llama by type alone": Directory(known("llama-2"), tokenizer_config={"legacy": True, "bos_token": "<s>"}),
    "PreTrainedTokenizerFast": Directory(
        known("metaspace"), tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    ),
    "GemmaTokenizer with more tokens": Directory(
        known("metaspace"),
        config={"model_type": "gemma"},
        tokenizer_config={"tokenizer_class": "GemmaTokenizer", "bos_token": "<bos>"},
    ),
    "GemmaTokenizer": Directory(
        known("metaspace", "<pad>", "<eos>", "<bos>", "<mask>"),
        config={"model_type": "gemma2"},
        tokenizer_config={"tokenizer_class": "GemmaTokenizer", "bos_token": "<bos>"},
    ),
    "Qwen2Tokenizer": Directory(
        known("qwen", "<|endoftext|>"),
        config={"model_type": "qwen2"},
        tokenizer_config={"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "bos_token": None},
    ),
    "Qwen2Tokenizer of another structure": Directory(
        known("smollm", "<|endoftext|>"),
        config={"model_type": "qwen3"},
        tokenizer_config={"tokenizer_class": "Qwen2Tokenizer"},
    ),
    "Qwen2Tokenizer with a token less": Directory(
        known("qwen", "<|endoftext|>"),
        config={"model_type": "qwen2"},
        tokenizer_config={
            "tokenizer_class": "Qwen2Tokenizer",
            "eos_token": "<|im_end|>",
            "added_tokens_decoder": {"407": token("</think>"), "408": token("<|im_end|>", special=True)},
        },
    ),
    "mistral": Directory(known("mistral"), config={"model_type": "mistral"}, tokenizer_config={"bos_token": "<s>"}),
    "deepseek": Directory(
        known("deepseek-3"),
        config={"model_type": "deepseek_v3"},
        tokenizer_config={"tokenizer_class": "LlamaTokenizerFast", "bos_token": typed("<｜begin▁of▁sentence｜>")},
    ),
    "unknown class": Directory(tokenizer_config=_BOS_EOS | {"tokenizer_class": "NoSuchTokenizer"}),
    "unknown model": Directory(config={"model_type": "no-such-model"}, tokenizer_config=_BOS_EOS),
    # Where the templates are.
    "named files": Directory(
        tokenizer_config=_BOS_EOS,
        templates={
            CHAT_TEMPLATE: CHAT,
            "additional_chat_templates/tool_use.jinja": TOOL_USE,
            "additional_chat_templates/rag.jinja": "{{ unclosed",
        },
    ),
    "a default among named files": Directory(
        tokenizer_config=_BOS_EOS | {"chat_template": _OTHER},
        templates={
            "additional_chat_templates/default.jinja": CHAT,
            "additional_chat_templates/tool_use.jinja": TOOL_USE,
        },
    ),
    "a list in the configuration": Directory(
        tokenizer_config=_BOS_EOS
        | {"chat_template": [{"name": "tool_use", "template": TOOL_USE}, {"name": "default", "template": CHAT}]},
        templates={},
    ),
    "a file against the configuration": Directory(
        tokenizer_config=_BOS_EOS | {"chat_template": [{"name": "tool_use", "template": TOOL_USE}]},
        templates={CHAT_TEMPLATE: CHAT},
    ),
    "chat_template.json": Directory(
        tokenizer_config=_BOS_EOS | {"chat_template": CHAT},
        templates={"chat_template.json": json.dumps({"chat_template": _OTHER})},
    ),
    "special tokens of the map in a template of the configuration": Directory(
        tokenizer_config={"chat_template": CHAT}, special_tokens_map=_BOS_EOS, templates={}
    ),
}


def copy_with_map(model_dir: Path, directory: Path) -> Path:
    """A copy of a real model's tokenizer files whose special tokens stand only in special_tokens_map.json."""
    directory.mkdir()
    for name in (CONFIG, TOKENIZER, CHAT_TEMPLATE):
        shutil.copy(model_dir / name, directory / name)
    config = json.loads((model_dir / TOKENIZER_CONFIG).read_text())
    names = [name for name, value in config.items() if name.endswith("_token") and isinstance(value, str)]
    (directory / SPECIAL_TOKENS_MAP).write_text(json.dumps({name: config.pop(name) for name in names}))
    (directory / TOKENIZER_CONFIG).write_text(json.dumps(config))
    return directory
