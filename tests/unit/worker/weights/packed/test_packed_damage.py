"""What can happen to a file of packed weights: the load is right all the same, and the next one has a file again."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.worker.models.loader import LoadOptions, load_model
from services.worker.ops import load_ops
from services.worker.ops.matrix_rows import MatrixFormat
from shared.model_files.packed_files import PackedCache, PackedFile
from tests.support.models.paged_model import PagedModel
from tests.support.models.tiny_llama import write_tiny_llama

KEPT, READ, REMOVED = "are kept in a file", "are read from a file", "is removed"
NOT_KEPT = "packed weights are not kept in a file"


class Model:
    """A small model, its logits and a cache of its own."""

    def __init__(self, model_dir: Path, cache: Path) -> None:
        self.model_dir = model_dir
        self.cache = cache
        self.max_bytes = 1 << 30
        self.expected = self.logits(None)

    def check(self, caplog: pytest.LogCaptureFixture, *messages: str) -> None:
        """Load with the cache: the bits are those without it, and these messages are logged, no other ones of these."""
        caplog.clear()
        assert torch.equal(self.logits(PackedCache(self.cache, self.max_bytes)), self.expected)
        assert {each for each in (KEPT, READ, REMOVED, NOT_KEPT) if each in caplog.text} == set(messages)

    @property
    def file(self) -> Path:
        (file,) = self.cache.iterdir()
        return file

    def logits(self, packed: PackedCache | None) -> Tensor:
        ops, options = load_ops("native"), LoadOptions(quantization=MatrixFormat.INT8, packed=packed)
        loaded = load_model(self.model_dir, ops, torch.float32, lambda _: None, options=options)
        paged = PagedModel(loaded.model, ops, num_blocks=8)
        return paged.prefill_all(paged.add([5, 9, 30, 4, 77]))


@pytest.fixture
def model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Model:
    caplog.set_level("INFO")
    return Model(write_tiny_llama(tmp_path / "model", changes={"num_hidden_layers": 2}), tmp_path / "cache")


def write_again(path: Path, change: Callable[[bytearray], bytearray]) -> None:
    """Put changed contents in the file's place, as of the same user."""
    content = change(bytearray(path.read_bytes()))
    path.unlink()
    path.write_bytes(content)
    path.chmod(0o600)


def flipped(content: bytearray, place: int) -> bytearray:
    content[place] ^= 1 << place % 8
    return content


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.9, 0.99, 1.0])
def test_a_flipped_bit_anywhere_is_found(model: Model, part: float, caplog: pytest.LogCaptureFixture) -> None:
    model.check(caplog, KEPT)
    write_again(model.file, lambda content: flipped(content, int(part * (len(content) - 1))))
    model.check(caplog, REMOVED, KEPT)
    model.check(caplog, READ)


# The fields of the trailer, which is the end of the file.
@pytest.mark.parametrize("place", [-28, -20, -13, -12, -5, -4, -1])
def test_a_flipped_bit_in_each_field_of_the_trailer_is_found(
    model: Model, place: int, caplog: pytest.LogCaptureFixture
) -> None:
    model.check(caplog, KEPT)
    write_again(model.file, lambda content: flipped(content, len(content) + place))
    model.check(caplog, REMOVED, KEPT)


@pytest.mark.proof
def test_every_flipped_byte_is_found(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    model.check(caplog, KEPT)
    num_bytes = model.file.stat().st_size
    for place in range(0, num_bytes, num_bytes // 400):
        write_again(model.file, partial(flipped, place=place))
        model.check(caplog, REMOVED, KEPT)


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.999])
def test_a_truncated_file_is_found(model: Model, kept: float, caplog: pytest.LogCaptureFixture) -> None:
    model.check(caplog, KEPT)
    write_again(model.file, lambda content: content[: int(kept * len(content))])
    model.check(caplog, REMOVED, KEPT)
    model.check(caplog, READ)


def test_a_file_that_is_truncated_while_it_is_read_is_found(
    model: Model, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.check(caplog, KEPT)
    read, file = os.preadv, model.file

    def read_of_a_part(fd: int, buffers: Sequence[memoryview], place: int) -> int:
        os.truncate(file, 1000)
        return read(fd, buffers, place)

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", read_of_a_part)
        model.check(caplog, REMOVED, KEPT)
    model.check(caplog, READ)


def test_a_file_that_is_truncated_or_removed_after_the_load_matters_to_nobody(
    model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    model.check(caplog, KEPT)
    ops, packed = load_ops("native"), PackedCache(model.cache, model.max_bytes)
    options = LoadOptions(quantization=MatrixFormat.INT8, packed=packed)
    loaded = load_model(model.model_dir, ops, torch.float32, lambda _: None, options=options)
    os.truncate(model.file, 0)
    model.file.unlink()
    paged = PagedModel(loaded.model, ops, num_blocks=8)
    assert torch.equal(paged.prefill_all(paged.add([5, 9, 30, 4, 77])), model.expected)


@pytest.mark.parametrize("mode", [0o777, 0o750, 0o701])
def test_a_folder_that_is_not_the_users_alone_is_not_used(
    model: Model, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    model.cache.mkdir()
    model.cache.chmod(mode)
    model.check(caplog, NOT_KEPT)
    assert not list(model.cache.iterdir())


def test_a_link_to_a_folder_is_not_used(model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    model.cache.symlink_to(tmp_path / "elsewhere")
    model.check(caplog, NOT_KEPT)


def test_a_file_that_others_can_write_is_not_read(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    model.check(caplog, KEPT)
    model.file.chmod(0o666)
    model.check(caplog, REMOVED, KEPT)


def test_a_folder_below_a_file_is_said_once(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    model.cache.write_bytes(b"")
    model.check(caplog, NOT_KEPT)
    assert caplog.text.count(NOT_KEPT) == 1


def test_a_read_only_folder_is_said_once_and_its_files_are_read(
    model: Model, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.check(caplog, KEPT)
    open_, content = os.open, model.file.read_bytes()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def open_for_reading(path: str, flags: int, *args: Any, **options: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            refuse()
        return open_(path, flags, *args, **options)

    # The folder's mode does not bind root.
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", open_for_reading)
        for name in ("utime", "unlink"):
            patched.setattr(os, name, refuse)
        model.check(caplog, READ)
    assert model.file.read_bytes() == content
    model.file.unlink()
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", open_for_reading)
        model.check(caplog, NOT_KEPT)
        assert caplog.text.count(NOT_KEPT) == 1
    assert not list(model.cache.iterdir())


@contextmanager
def limited_files(num_bytes: int) -> Iterator[None]:
    """No file of this process may become larger: a write beyond fails, as on a full disk."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_file_that_cannot_be_written_to_its_end_leaves_nothing(
    model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    for part in (0.3, 0.6, 0.95):
        model.check(caplog, KEPT)
        num_bytes = model.file.stat().st_size
        model.file.unlink()
        with limited_files(int(part * num_bytes)):
            model.check(caplog, NOT_KEPT)
        assert not list(model.cache.iterdir())


def test_a_bound_below_the_files_size_keeps_none(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    model.max_bytes = 10_000
    model.check(caplog, NOT_KEPT)
    assert not list(model.cache.iterdir())


def test_a_new_file_takes_the_room_of_those_unused_for_longest(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    model.check(caplog, KEPT)
    own, num_bytes = model.file, model.file.stat().st_size
    own.unlink()
    others = [model.cache / f"{number:032x}.packed" for number in range(3)]
    for number, other in enumerate(others):
        other.write_bytes(bytes(1000))
        os.utime(other, (1000 + number, 1000 + number))
    # Room for two of them.
    model.max_bytes = num_bytes + 2500
    model.check(caplog, KEPT)
    assert sorted(model.cache.iterdir()) == sorted([own, *others[1:]])


def test_changed_sources_are_packed_anew(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    model.check(caplog, KEPT)
    first = model.file
    weights = model.model_dir / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content)
    # The same bytes, written again: states do not say that.
    model.check(caplog, KEPT)
    other = next(each for each in model.cache.iterdir() if each != first)
    assert other.read_bytes()[:1000] == first.read_bytes()[:1000]


def test_weights_that_change_while_they_load_are_not_kept(
    model: Model, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = PackedFile.append

    def touch(file: PackedFile, data: memoryview) -> int:
        os.utime(model.model_dir / "model.safetensors")
        return publish(file, data)

    monkeypatch.setattr(PackedFile, "append", touch)
    model.check(caplog, NOT_KEPT)


def test_two_that_pack_at_once_leave_one_file(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    with ThreadPoolExecutor(2) as pool:
        for logits in pool.map(lambda _: model.logits(PackedCache(model.cache, 1 << 30)), range(2)):
            assert torch.equal(logits, model.expected)
    model.check(caplog, READ)
    assert model.file.stat().st_nlink == 1
