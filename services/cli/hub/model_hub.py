"""Models by name, from a hub that speaks Hugging Face's protocol, in the cache that its library keeps.

Endpoint, token, proxy and cache are the library's own settings (HF_ENDPOINT, HF_TOKEN, HTTPS_PROXY, HF_HOME and
others). The library resumes a connection that breaks, and keeps files that are complete. The hub's hash of every file
is checked here, since the library does not.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from httpx2 import HTTPError, TransportError
from huggingface_hub import HfApi, constants, hf_hub_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.hf_api import RepoSibling

from services.cli.hub.model_name import GgufName, ModelName
from shared.model_files.embedders import as_causal
from shared.model_files.gguf_names import SUFFIX, part_paths
from shared.model_files.implementations import WantedImplementation, implementation_of
from shared.model_files.missing_files import TEKKEN, TIKTOKEN
from shared.model_files.model_dir import (
    ADDED_TOKENS,
    CHAT_TEMPLATE,
    CONFIG,
    GENERATION_CONFIG,
    HF_QUANT_CONFIG,
    MORE_TEMPLATES,
    PROCESSOR_TEMPLATE,
    QUANT_CONFIG,
    QUANTIZE_CONFIG,
    SENTENCE_CONFIG,
    SENTENCE_MODEL_CONFIG,
    SENTENCE_MODULES,
    SPECIAL_TOKENS_MAP,
    TOKENIZER,
    TOKENIZER_CONFIG,
    WEIGHTS,
    WEIGHTS_INDEX,
    ModelDirectoryError,
    read_config,
    shard_names,
)
from shared.model_files.tiktoken_vocabulary import convert_vocabulary

_NEEDED = (CONFIG, TOKENIZER)
_WANTED = frozenset(
    {*_NEEDED, GENERATION_CONFIG, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, ADDED_TOKENS, CHAT_TEMPLATE}
    | {PROCESSOR_TEMPLATE, WEIGHTS_INDEX, HF_QUANT_CONFIG, QUANTIZE_CONFIG, QUANT_CONFIG}
    | {SENTENCE_MODULES, SENTENCE_CONFIG, SENTENCE_MODEL_CONFIG}
)
_OWN_TOKENIZER = (
    f"; its vocabulary is in Mistral's own format ({TEKKEN}), which is not read: convert it with transformers' "
    "AutoTokenizer, or take a repository of the same model with tokenizer.json"
)
# Beside the library's folders of a model: for each commit, the files whose hashes were right.
_VERIFIED = "lockstep-verified"
_POLL_S = 2.0


class HubError(Exception):
    """The model cannot be had; the message says why and what to do."""


def fetch_model(name: ModelName, *, with_weights: bool = True, wanted: WantedImplementation = "auto") -> Path:
    """Make a model's files local, unless they are.

    Says on stderr what it downloads; in a terminal the library draws a bar for each file. If the hub cannot be reached,
    what was fetched before is used.

    Args:
        with_weights: False fetches what a tokenizer needs.
        wanted: Whose code is to compute the model.

    Returns:
        The directory, in the library's cache.

    Raises:
        HubError: it cannot be had, or has no architecture that is served.
    """
    with _explained(name):
        revision = HfApi().resolve_revision(name.repository, revision=name.revision)
        download = _Download(name, revision.resolved)
        if not download.is_verified(with_weights=with_weights):
            download.run(with_weights=with_weights, wanted=wanted)
        return download.directory


def fetch_gguf(name: GgufName) -> Path:
    """Make a GGUF file local, and all other files that it is split into, unless they are; returns it, or the first.

    Raises:
        HubError: it cannot be had, or the name means none or several files.
    """
    with _explained(name.model):
        revision = HfApi().resolve_revision(name.model.repository, revision=name.model.revision)
        return _Download(name.model, revision.resolved).gguf(name)


def wait_for_model(name: ModelName) -> Path:
    """Wait until another process with the same cache has fetched a commit of a model, which is its revision."""
    assert name.revision is not None
    download = _Download(name, name.revision)
    while not download.is_verified(with_weights=True):
        time.sleep(_POLL_S)
    return download.directory


class _Download:
    """One commit of a model, on its way into the cache."""

    def __init__(self, name: ModelName, commit: str) -> None:
        self._name, self._commit = name, commit
        folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name.repository, repo_type="model")
        self.directory = folder / "snapshots" / commit
        self._mark = folder / _VERIFIED / f"{commit}.json"
        self._mark_without_weights = folder / _VERIFIED / f"{commit}-without-weights.json"

    def is_verified(self, *, with_weights: bool) -> bool:
        """Whether all files are there and had the right hashes."""
        return self._has_files_of(self._mark) or (not with_weights and self._has_files_of(self._mark_without_weights))

    def run(self, *, with_weights: bool, wanted: WantedImplementation) -> None:
        """Fetch and verify the files, the small ones first, since they say whether the model can be served."""
        info = HfApi().model_info(self._name.repository, revision=self._commit, files_metadata=True)
        files = {sibling.rfilename: sibling for sibling in info.siblings or []}
        self._check_names(files)
        needed = _WANTED if TOKENIZER in files else _WANTED | {TIKTOKEN}
        small = [files[name] for name in sorted(files) if name in needed or _is_template(name) or _is_module(name)]
        self._fetch(small)
        try:
            # It may be for vectors.
            implementation_of(as_causal(read_config(self.directory)), wanted)
            convert_vocabulary(self.directory)
            weights = self._weights(files) if with_weights else []
        except ModelDirectoryError as error:
            raise HubError(f"{self._name}: {error}") from None
        self._fetch(weights)
        names = {TOKENIZER, *(file.rfilename for file in small + weights)}
        _write_mark(self._mark if with_weights else self._mark_without_weights, names)

    def gguf(self, name: GgufName) -> Path:
        """Fetch and verify a file and what belongs to it, unless that was done; returns the first."""
        key = hashlib.sha256(str(name).encode()).hexdigest()
        mark = self._mark.with_name(f"{self._commit}-{key[:16]}.json")
        if not self._has_files_of(mark):
            info = HfApi().model_info(self._name.repository, revision=self._commit, files_metadata=True)
            files = {sibling.rfilename: sibling for sibling in info.siblings or []}
            wanted = _choose_gguf(files, name)
            self._fetch([files[each] for each in wanted])
            _write_mark(mark, wanted)
        return self.directory / min(_read_mark(mark))

    def _has_files_of(self, mark: Path) -> bool:
        try:
            names = _read_mark(mark)
        except FileNotFoundError:
            return False
        return all((self.directory / name).is_file() for name in names)

    def _check_names(self, names: Iterable[str]) -> None:
        top = sorted(name for name in names if "/" not in name)
        if WEIGHTS not in top and WEIGHTS_INDEX not in top:
            raise HubError(f"{self._name} has no {WEIGHTS} and no {WEIGHTS_INDEX}{_other_weights(top)}")
        for name in _NEEDED:
            if name not in top and not (name == TOKENIZER and TIKTOKEN in top):
                raise HubError(f"{self._name} has no {name}{_OWN_TOKENIZER if TEKKEN in top else ''}")

    def _weights(self, files: dict[str, RepoSibling]) -> list[RepoSibling]:
        if WEIGHTS_INDEX not in files:
            return [files[WEIGHTS]]
        return [files[name] for name in shard_names(self.directory, files.__contains__)]

    def _fetch(self, files: Iterable[RepoSibling]) -> None:
        for file in files:
            sys.stderr.write(f"{self._name}: {file.rfilename} ({_size(file.size or 0)})\n")
            path = Path(hf_hub_download(self._name.repository, file.rfilename, revision=self._commit))
            if not _has_right_hash(path, file):
                # Both the link in the snapshot and what it points to.
                path.resolve().unlink()
                path.unlink(missing_ok=True)
                raise HubError(
                    f"{self._name}: {file.rfilename} is not what the hub says it is: its hash differs. It was deleted; "
                    "another run downloads it again"
                )


def _choose_gguf(files: Collection[str], name: GgufName) -> list[str]:
    """The names of the file that `name` means, and of all others that it is split into."""
    # Projectors of images are no models.
    firsts = [each for each in sorted(files) if each.endswith(SUFFIX) and not Path(each).name.startswith("mmproj")]
    firsts = [each for each in firsts if str(part_paths(Path(each))[0]) == each]
    if name.kind is None:
        found = [each for each in files if each == name.file]
    else:
        pattern = re.compile(rf"(?:^|[-._/]){re.escape(name.kind)}(?=[-._/]|$)", re.IGNORECASE)
        found = [each for each in firsts if pattern.search(each.removesuffix(SUFFIX))]
    if len(found) != 1:
        problem = "has no such file" if not found else f"has {len(found)} such files"
        listed = ", ".join(found or firsts) or "none"
        raise HubError(f"{name.model} {problem} as {name}; GGUF files: {listed}")
    parts = [str(part) for part in part_paths(Path(found[0]))]
    if missing := [part for part in parts if part not in files]:
        raise HubError(f"{name.model} lacks {', '.join(missing)}")
    return parts


def _read_mark(mark: Path) -> list[str]:
    names: list[str] = json.loads(mark.read_text(encoding="utf-8"))
    return names


def _write_mark(mark: Path, names: Iterable[str]) -> None:
    mark.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own, since a process of another pod, with the same process id, may write the same mark.
    part = mark.with_suffix(f".{secrets.token_hex(8)}.part")
    part.write_text(json.dumps(sorted(names)), encoding="utf-8")
    part.replace(mark)


@contextmanager
def _explained(name: ModelName) -> Iterator[None]:
    """Turn the library's errors, whose texts are pages long, into one sentence each."""
    page = f"{constants.ENDPOINT}/{name.repository}"
    try:
        yield
    except GatedRepoError:
        raise HubError(
            f"{name} is gated: accept its conditions at {page}, and set HF_TOKEN to a token of the account that did"
        ) from None
    except RevisionNotFoundError:
        raise HubError(f"{name.repository} has no revision {name.revision or constants.DEFAULT_REVISION}") from None
    except RepositoryNotFoundError:
        raise HubError(
            f"there is no {page}, or it is private: then HF_TOKEN must be a token of an account that may read it"
        ) from None
    except (RevisionResolutionError, LocalEntryNotFoundError, OfflineModeIsEnabled, TransportError) as error:
        reason = error.__cause__ or error
        raise HubError(
            f"{constants.ENDPOINT} cannot be reached, and no pull of {name} was complete: {reason}"
        ) from None
    except HfHubHTTPError as error:
        raise HubError(f"{constants.ENDPOINT} answered {error.response.status_code} about {name}") from None
    except HFValidationError as error:
        raise HubError(str(error)) from None
    except (HTTPError, OSError) as error:
        raise HubError(f"{name} cannot be downloaded: {error}") from None


def _has_right_hash(path: Path, file: RepoSibling) -> bool:
    """Compare with Git LFS's SHA-256, or for a small file with Git's own hash of it."""
    if file.lfs is not None:
        return _hash(path, hashlib.sha256) == file.lfs.sha256
    # Git's: its documentation, "Git Internals - Git Objects", object storage.
    return _hash(path, hashlib.sha1, b"blob %d\0" % path.stat().st_size) == file.blob_id


def _hash(path: Path, make: Callable[[bytes], hashlib._Hash], start: bytes = b"") -> str:
    digest = make(start)
    with path.open("rb") as content:
        while chunk := content.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _is_template(name: str) -> bool:
    folder, _, file = name.rpartition("/")
    return folder == MORE_TEMPLATES and file.endswith(".jinja")


def _is_module(name: str) -> bool:
    """Whether a file configures a module that sentence-transformers computes."""
    return re.fullmatch(r"\d+_\w+/config\.json", name) is not None


def _other_weights(names: list[str]) -> str:
    if any(name.startswith("consolidated") and name.endswith(".safetensors") for name in names):
        return "; its weights are in Mistral's own format (consolidated*.safetensors), which is not read"
    if any(name.endswith(".gguf") for name in names):
        return "; it has GGUF files, which `lockstep serve ORG/NAME/FILE.gguf` takes"
    if any(name.endswith((".bin", ".pt", ".pth", ".ckpt")) for name in names):
        return "; its weights are in a format that can run code and is not read"
    return ""


def _size(num_bytes: int) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} bytes"
