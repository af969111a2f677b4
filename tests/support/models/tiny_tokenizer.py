"""A small but real tokenizer on disk: byte-level BPE as in SmolLM2, with a ChatML template."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from shared.model_files.model_dir import CHAT_TEMPLATE, CONFIG, GENERATION_CONFIG, TOKENIZER

ENDOFTEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
ENDOFTEXT_ID, IM_START_ID, IM_END_ID = 0, 1, 2
VOCABULARY_SIZE = 420
CONTEXT_LENGTH = 256

CHATML = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are helpful<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""
# The same, with tools listed first, and calls after their messages' content.
TOOLS_CHATML = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}" + CHATML.replace(
    "message['content'] + '<|im_end|>'",
    "message['content'] }}{% for call in message['tool_calls'] or [] %}{{ call.function | tojson }}{% endfor %}"
    "{{ '<|im_end|>'",
)

# Yields merges of every kind: words, spaces, and parts of characters of two, three and four bytes.
_TRAINING_TEXT = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox does not.",
    "def main() -> None:\n    return print('hello, world')\n",
    "Привет, мир! Как дела? Всё хорошо.",
    "你好 世界。今天天气很好。 日本語のテキスト",
    "😀😁😂🤣 🎉🎊 👩‍👩‍👧‍👦 naïve café",
]


def write_tiny_tokenizer(directory: Path, *, chat_template: str | None = CHATML) -> None:
    """Write the files of a model directory that a tokenizer service reads.

    Args:
        directory: Must exist; an existing configuration is not changed.
        chat_template: The template's source; None writes none.
    """
    tiny_tokenizer().save(str(directory / TOKENIZER))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "bos_token": IM_START,
            "eos_token": IM_END,
            "pad_token": IM_END,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    if chat_template is not None:
        (directory / CHAT_TEMPLATE).write_text(chat_template, encoding="utf-8")
    if not (directory / CONFIG).exists():
        _write_json(
            directory / CONFIG,
            {"model_type": "llama", "vocab_size": VOCABULARY_SIZE, "max_position_embeddings": CONTEXT_LENGTH},
        )
        _write_json(directory / GENERATION_CONFIG, {"bos_token_id": IM_START_ID, "eos_token_id": IM_END_ID})


def tiny_tokenizer() -> Tokenizer:
    """Train the tokenizer, deterministically."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[AddedToken(text, special=True) for text in (ENDOFTEXT, IM_START, IM_END)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TRAINING_TEXT * 4, trainer)
    return tokenizer


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
