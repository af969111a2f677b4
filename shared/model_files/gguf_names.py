"""The names of GGUF files: a model may be split into parts, `NAME-00001-of-0000N.gguf`.

Source: llama.cpp, src/llama.cpp, `llama_split_path`.
"""

from __future__ import annotations

import re
from pathlib import Path

SUFFIX = ".gguf"
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def model_name(path: Path) -> str:
    """The file's name without its suffix, and without the number of a part."""
    match = _PART.fullmatch(path.name)
    return path.name.removesuffix(SUFFIX) if match is None else match[1]


def part_paths(path: Path) -> list[Path]:
    """The files of the model that `path` is the first part of, by their names: itself alone if it is not split."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    return [path.with_name(part_name(match[1], number, int(match[3]))) for number in range(int(match[3]))]


def part_name(name: str, number: int, count: int) -> str:
    """The name of part `number`, counted from 0."""
    return f"{name}-{number + 1:05}-of-{count:05}{SUFFIX}"
