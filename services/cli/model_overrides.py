"""A model's directory with other values in its configuration: links to its files, and the files that differ.

All services read the same directory, so every rank and every tokenizer has the same values, and the model's digest,
which covers config.json, has them too. It is kept under a name made of what it is made of, since packed weights are
found again by the state of the files that they were made from.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.cli.processes.preflight import RefusedError
from shared.model_files.model_dir import CONFIG, GENERATION_CONFIG, ModelDirectoryError, read_json, read_json_if_any
from shared.model_files.packed_files import default_packed_dir

_FOLDER = "overrides"
# Of a hub's snapshot, the parts of the path that say the model's name.
_SNAPSHOT_PARTS = 3


def override_model(model_dir: Path, config: Mapping[str, Any], generation: Mapping[str, Any]) -> Path:
    """The directory of a model with values of config.json and generation_config.json replaced.

    Those of a part of the configuration, such as `text_config`, are replaced one by one.

    Raises:
        RefusedError: the model's files cannot be read, or the directory cannot be made.
    """
    if not (config or generation):
        return model_dir
    source = model_dir.resolve()
    try:
        contents = {CONFIG: _merge(read_json(source, CONFIG), config)} if config else {}
        if generation:
            contents[GENERATION_CONFIG] = {**read_json_if_any(source, GENERATION_CONFIG), **generation}
        return _keep(source, {name: json.dumps(content, indent=2) for name, content in contents.items()})
    except ModelDirectoryError as error:
        raise RefusedError(str(error)) from None
    except OSError as error:
        raise RefusedError(f"the model's changed configuration cannot be kept: {error}") from None


def _merge(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(config)
    for name, value in overrides.items():
        present = merged.get(name)
        # As vLLM does: a part is a model's configuration, any other object a value.
        is_part = name.endswith("_config") and name != "quantization_config"
        if is_part and isinstance(present, dict) and isinstance(value, dict):
            merged[name] = _merge(present, value)
        else:
            merged[name] = value
    return merged


def _keep(source: Path, texts: Mapping[str, str]) -> Path:
    links = {path.name: path for path in source.iterdir() if path.name not in texts}
    parts = [str(source), sorted(links), sorted(texts.items())]
    key = hashlib.sha256(json.dumps(parts).encode(errors="surrogateescape")).hexdigest()
    is_snapshot = source.parent.name == "snapshots"
    name = Path(*source.parts[-_SNAPSHOT_PARTS:]) if is_snapshot else Path(source.name)
    folder = default_packed_dir().parent / _FOLDER
    directory = folder / key / name
    if directory.is_dir():
        return directory
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as new:
        made = Path(new) / key / name
        made.mkdir(parents=True)
        for link, target in links.items():
            (made / link).symlink_to(target)
        for file, text in texts.items():
            (made / file).write_text(text, encoding="utf-8")
        try:
            (Path(new) / key).rename(folder / key)
        except OSError:
            # Another start has made it.
            if not directory.is_dir():
                raise
    return directory
