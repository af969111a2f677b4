"""The JSON Schema Test Suite, as included in the source archive of the `jsonschema` package."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
from jsonschema.protocols import Validator

from services.tokenizer.json.closed_schema import OPEN

SUITE = Path(__file__).parents[3] / ".cache" / "jsonschema-4.26.0.tar.gz"

_FOLDER_TO_DIALECT: dict[str, type[Validator]] = {
    "draft2020-12": jsonschema.Draft202012Validator,
    "draft2019-09": jsonschema.Draft201909Validator,
    "draft7": jsonschema.Draft7Validator,
    "draft6": jsonschema.Draft6Validator,
    "draft4": jsonschema.Draft4Validator,
}


@dataclass(frozen=True, slots=True)
class SuiteSchema:
    """One schema of the suite with its dialect, and the suite's valid (`good`) and invalid (`bad`) values."""

    name: str
    schema: dict[str, Any]
    validator: Validator
    good: tuple[Any, ...]
    bad: tuple[Any, ...]

    @property
    def source(self) -> str:
        """The schema as JSON text, whose objects stay open."""
        return json.dumps({**self.schema, OPEN: True})

    def is_fit(self, text: str) -> bool:
        """Whether a JSON text is valid under the schema."""
        return self.validator.is_valid(json.loads(text))


def read_suite() -> list[SuiteSchema]:
    """All schemas that are objects, without the optional ones such as formats, on which validators differ."""
    assert SUITE.exists(), "the suite is missing: `make test` downloads it"
    with tarfile.open(SUITE) as archive:
        return [schema for member in archive if _is_wanted(member.name) for schema in _read(archive, member)]


def _is_wanted(path: str) -> bool:
    parts = path.split("/")
    return parts[1:3] == ["json", "tests"] and parts[3] in _FOLDER_TO_DIALECT and len(parts) == 5


def _read(archive: tarfile.TarFile, member: tarfile.TarInfo) -> Iterator[SuiteSchema]:
    file = archive.extractfile(member)
    assert file is not None
    folder, file_name = member.name.split("/")[3:5]
    dialect = _FOLDER_TO_DIALECT[folder]
    for group in json.load(file):
        if isinstance(group["schema"], dict):
            schema = {"$schema": dialect.META_SCHEMA["$schema"], **group["schema"]}
            values = {
                is_good: tuple(t["data"] for t in group["tests"] if t["valid"] is is_good) for is_good in (True, False)
            }
            name = f"{folder}/{file_name}: {group['description']}"
            yield SuiteSchema(name, schema, dialect(schema), values[True], values[False])
