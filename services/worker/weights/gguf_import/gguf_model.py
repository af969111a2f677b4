"""A model in one GGUF file, or split into several."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from services.worker.weights.gguf_import.gguf_file import GgufFile, GgufTensor, MalformedGgufError
from shared.model_files.gguf_names import model_name, part_name, part_paths

_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"


class GgufModel:
    """The metadata of the first file, and the tensors of all. A context manager; tensors are read while it is open."""

    def __init__(self, path: Path) -> None:
        """Open the model's only file, or its first.

        Raises:
            MalformedGgufError: a file is malformed or missing, or they are not the parts of one model; see `GgufFile`.
            OSError: a file cannot be read.
        """
        with ExitStack() as stack:
            first = stack.enter_context(GgufFile(path))
            self.metadata: Mapping[str, Any] = first.metadata
            files = {path: first}
            for other in self._others(path):
                files[other] = stack.enter_context(_open_part(other))
            for number, (each, file) in enumerate(files.items()):
                if len(files) > 1:
                    _check_part(each, file, number, len(files))
            self.tensors = _joined(files)
            if len(files) > 1 and (count := self.metadata.get(_TENSORS)) not in (None, len(self.tensors)):
                raise MalformedGgufError(f"its parts have {len(self.tensors)} tensors, but {_TENSORS} is {count!r}")
            self._stack = stack.pop_all()

    def __enter__(self) -> GgufModel:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, tb)

    def _others(self, path: Path) -> list[Path]:
        """The files after the first, which are all there."""
        count, number = self.metadata.get(_COUNT, 1), self.metadata.get(_NUMBER, 0)
        if type(count) is not int or type(number) is not int:
            raise MalformedGgufError(f"{_COUNT} is {count!r} and {_NUMBER} {number!r}, not whole numbers")
        if count <= 1:
            return []
        paths = part_paths(path)
        name = model_name(path)
        if number != 0 or path != paths[0]:
            raise MalformedGgufError(f"it is part {number + 1} of {count}: give the first, {part_name(name, 0, count)}")
        if len(paths) != count:
            expected = part_name(name, 0, count)
            raise MalformedGgufError(f"it is the first of {count} parts, and so must be called like {expected}")
        if missing := [each.name for each in paths if not each.is_file()]:
            raise MalformedGgufError(f"parts are missing beside it: {', '.join(missing)}")
        return paths[1:]


def _open_part(path: Path) -> GgufFile:
    try:
        return GgufFile(path)
    except MalformedGgufError as error:
        raise MalformedGgufError(f"of its parts {path.name} is malformed: {error}") from error


def _check_part(path: Path, file: GgufFile, number: int, count: int) -> None:
    found = file.metadata.get(_NUMBER), file.metadata.get(_COUNT)
    if found != (number, count):
        raise MalformedGgufError(f"{path.name} has {_NUMBER} {found[0]!r} and {_COUNT} {found[1]!r}, as no such part")


def _joined(files: Mapping[Path, GgufFile]) -> tuple[GgufTensor, ...]:
    name_to_tensor: dict[str, GgufTensor] = {}
    for path, file in files.items():
        for tensor in file.tensors:
            if tensor.name in name_to_tensor:
                raise MalformedGgufError(f"the tensor {tensor.name} of {path.name} is in another part too")
            name_to_tensor[tensor.name] = tensor
    return tuple(name_to_tensor.values())
