"""Ranks divide the hashing of what they read from the same files, and compare what they read from different ones."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from services.worker.layout import RankLayout
from services.worker.parallel.communicator import Parallel
from services.worker.weights import tensor_digests
from services.worker.weights.tensor_digests import Hashing, TensorDigests
from services.worker.weights.weight_files import WeightFiles
from shared.model_files.model_dir import WEIGHTS, ModelDirectoryError
from tests.support.ranks.thread_ranks import run_ranks

TENSORS = {
    "embed": torch.arange(600, dtype=torch.float32).view(20, 30),
    **{f"layers.{layer}.up": torch.full((7, 9), layer, dtype=torch.bfloat16) for layer in range(5)},
    **{f"layers.{layer}.norm": torch.full((9,), layer, dtype=torch.float32) for layer in range(5)},
    "scalar": torch.tensor(3, dtype=torch.int64),
    "empty": torch.empty(0, 4),
}
SIZES = {name: tensor.nbytes for name, tensor in TENSORS.items()}
EXPECTED = {
    name: hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).digest()
    for name, tensor in TENSORS.items()
}
# `WeightFiles.digest` of them, in every release.
WHOLE = "1a488fbcdf02e68b067f169e7a235748d349c9ce276151e46b5a2350c776319e"


def layouts(size: int) -> list[RankLayout]:
    """The ranks of one TP group."""
    return [RankLayout(tp_rank=rank, tp_size=size) for rank in range(size)]


def write(directory: Path, tensors: dict[str, Tensor] = TENSORS) -> Path:
    directory.mkdir()
    save_file(tensors, directory / WEIGHTS)
    return directory


def digest_of(directories: Sequence[Path], rank: Parallel, *, names: Sequence[str] = tuple(TENSORS)) -> str:
    """The digest of what a rank reads from its own directory; or the message of a refusal."""
    try:
        with WeightFiles(directories[rank.tp.rank], hashing=Hashing(rank.tp, num_threads=2)) as files:
            for name in names:
                files.read(name)
            return files.digest()
    except ModelDirectoryError as error:
        return str(error)


def digests_of(directories: Sequence[Path]) -> list[str]:
    return run_ranks(layouts(len(directories)), partial(digest_of, directories))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_rank_gets_all_digests_and_hashes_only_its_share(tmp_path: Path, size: int) -> None:
    files = [write(tmp_path / "model") / WEIGHTS]

    def hash_share(rank: Parallel) -> tuple[frozenset[str], dict[str, bytes]]:
        digests = TensorDigests(files, SIZES, "same", Hashing(rank.tp))
        for name, tensor in TENSORS.items():
            # What another rank hashes is not looked at.
            digests.add(name, tensor if name in digests.share else torch.zeros(1))
        try:
            return digests.share, digests.exchange()
        finally:
            digests.close()

    results = run_ranks(layouts(size), hash_share)
    assert [digests for _, digests in results] == [EXPECTED] * size
    shares = [share for share, _ in results]
    assert sorted(name for share in shares for name in share) == sorted(TENSORS)
    # The embedding is larger than everything else together.
    loads = sorted(sum(SIZES[name] for name in share if name != "embed") for share in shares)
    assert size == 1 or (loads[0] == 0 and loads[-1] - loads[1] <= max(SIZES["layers.0.up"], SIZES["layers.0.norm"]))


def test_tensors_that_no_rank_reads_are_in_no_digest(tmp_path: Path) -> None:
    directory = write(tmp_path / "model")
    some = [name for name in TENSORS if name != "layers.3.up"]
    results = run_ranks(layouts(3), partial(digest_of, [directory] * 3, names=some))
    (alone,) = run_ranks(layouts(1), partial(digest_of, [directory], names=some))
    assert set(results) == {alone}
    assert alone != digests_of([directory])[0]


def test_copies_on_other_machines_are_hashed_too_and_give_the_same_digest(tmp_path: Path) -> None:
    first, second = write(tmp_path / "first"), write(tmp_path / "second")
    assert digests_of([first]) + digests_of([first, second]) + digests_of([first, second, first]) == [WHOLE] * 6


@pytest.mark.parametrize("name", ["embed", "layers.4.up", "scalar"])
def test_one_bit_that_differs_on_another_machine_is_found_by_every_rank(tmp_path: Path, name: str) -> None:
    first, second = write(tmp_path / "first"), tmp_path / "second"
    other = TENSORS[name].clone()
    other.view(-1)[-1:].view(torch.uint8)[0] ^= 1
    write(second, {**TENSORS, name: other})
    results = digests_of([first, second, first, second])
    assert results == [f"{each}: tensor {name} is not the same on all ranks" for each in (first, second, first, second)]


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.pop("scalar"),
        lambda tensors: tensors.update(scalar=torch.tensor(3, dtype=torch.int32)),
        lambda tensors: tensors.update(embed=tensors["embed"].view(30, 20)),
    ],
    ids=["name", "dtype", "shape"],
)
def test_other_headers_are_refused_before_anything_is_read(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], object]
) -> None:
    tensors = dict(TENSORS)
    change(tensors)
    directories = [write(tmp_path / "first"), write(tmp_path / "second", tensors)]
    results = run_ranks(layouts(2), partial(digest_of, directories, names=[]))
    assert results == [
        f"{each}: the tensors' names, dtypes and shapes are not the same on all ranks" for each in directories
    ]


def test_a_tensor_that_the_rank_which_hashes_it_has_not_read_is_an_error(tmp_path: Path) -> None:
    directory = write(tmp_path / "model")

    def read(rank: Parallel) -> str:
        # Rank 0 hashes the largest tensor.
        names = [name for name in TENSORS if rank.tp.rank or name != "embed"]
        return digest_of([directory] * 2, rank, names=names)

    assert run_ranks(layouts(2), read)[1] == f"{directory}: tensor embed is not the same on all ranks"


def shares_of(directories: Sequence[Path]) -> list[frozenset[str]]:
    def share_of(rank: Parallel) -> frozenset[str]:
        digests = TensorDigests([directories[rank.tp.rank] / WEIGHTS], SIZES, "", Hashing(rank.tp))
        digests.close()
        return digests.share

    return run_ranks(layouts(len(directories)), share_of)


def test_ranks_share_the_hashing_of_the_same_files_only(tmp_path: Path) -> None:
    first, second = write(tmp_path / "first"), write(tmp_path / "second")
    linked = tmp_path / "linked"
    linked.symlink_to(first)
    shares = shares_of([first, second, linked])
    assert shares[1] == frozenset(TENSORS)
    assert (shares[0] | shares[2], shares[0] & shares[2]) == (frozenset(TENSORS), frozenset())


def test_without_linux_every_rank_hashes_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_digests, "_BOOT_ID", tmp_path / "none")
    directory = write(tmp_path / "model")
    assert shares_of([directory] * 2) == [frozenset(TENSORS)] * 2
    assert digests_of([directory] * 2) == [WHOLE] * 2


def test_a_lost_partner_ends_the_exchange(tmp_path: Path) -> None:
    directory = write(tmp_path / "model")

    def leave_or_wait(rank: Parallel) -> str:
        if rank.tp.rank == 1:
            # Its connections are closed with the last reference.
            with WeightFiles(directory, hashing=Hashing(rank.tp)):
                return "left"
        with pytest.raises(RuntimeError):
            digest_of([directory] * 3, rank)
        return "noticed"

    assert run_ranks(layouts(3), leave_or_wait) == ["noticed", "left", "noticed"]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_reading_is_at_most_one_tensor_ahead_of_each_thread(
    tmp_path: Path, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [write(tmp_path / "model") / WEIGHTS]
    hash_tensor, num_hashed, lock = tensor_digests._hash, 0, threading.Lock()

    def count(tensor: Tensor) -> bytes:
        nonlocal num_hashed
        digest = hash_tensor(tensor)
        with lock:
            num_hashed += 1
        return digest

    monkeypatch.setattr(tensor_digests, "_hash", count)
    digests = TensorDigests(files, SIZES, "", Hashing(num_threads=num_threads))
    for num_added, (name, tensor) in enumerate(TENSORS.items(), start=1):
        digests.add(name, tensor)
        assert num_added - num_hashed <= num_threads + 1
    assert digests.exchange() == EXPECTED
    digests.close()
