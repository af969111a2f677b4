"""A small random model whose chat template takes tools, calls and reasoning."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from shared.model_files.model_dir import CHAT_TEMPLATE, TOKENIZER
from tests.support.models.tiny_llama import write_tiny_llama

# Of Qwen3's kind.
TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor -%}
{%- for message in messages %}{{ '<|im_start|>' ~ message.role ~ '\\n' -}}
{{ '<think>\\n' ~ message.reasoning_content ~ '\\n</think>\\n\\n' if message.reasoning_content }}{{ message.content -}}
{%- for call in message.tool_calls or [] -%}
{{ '<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' ~ call.function.arguments | tojson -}}
{{ '}\\n</tool_call>' -}}
{%- endfor %}{{ '<|im_end|>\\n' }}{% endfor -%}
{{ '<|im_start|>assistant\\n' if add_generation_prompt }}"""
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Tokens after all others, from id 420 on."""


def write_tool_caller(directory: Path, *, num_layers: int = 2, context_length: int = 2048) -> Path:
    """Write the model; returns `directory`, which is created if missing."""
    changes = {"num_hidden_layers": num_layers, "max_position_embeddings": context_length}
    write_tiny_llama(directory, changes=changes)
    tokenizer = Tokenizer.from_file(str(directory / TOKENIZER))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in MARKUP])
    tokenizer.save(str(directory / TOKENIZER))
    (directory / CHAT_TEMPLATE).write_text(TEMPLATE, encoding="utf-8")
    return directory
