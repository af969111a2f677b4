"""SHA-256 of a model's tensors, computed once on each machine by the ranks that read them there.

    machine A   rank 0 hashes t0 and t3           ─┐
                rank 1 hashes t1 and t2           ─┼─ all-gather: every rank has the digests of t0 to t3,
    machine B   rank 2 hashes t0, t1, t2 and t3   ─┘  and has compared those of A with those of B

So the bytes on every machine are hashed, and machines with different weights are found.
"""

from __future__ import annotations

import hashlib
import heapq
import os
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.worker.parallel.communicator import SINGLE, Communicator
from shared.model_files.model_dir import ModelDirectoryError

_DIGEST_BYTES = hashlib.sha256().digest_size
# No tensor has this digest.
_NOT_HASHED = bytes(_DIGEST_BYTES)
# One thread hashes 0.5 to 2 GB/s, by whether the processor has instructions for it. The thread that reads does not
# keep ahead of more.
_MAX_THREADS = 8
# Differs between machines, and between two starts of one.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Hashing:
    """What a rank hashes with."""

    ranks: Communicator = SINGLE.tp
    """The ranks that read the model together."""
    device: torch.device = _HOST
    """Where the tensors of their collectives are."""
    num_threads: int = 1
    """The cores that the rank may use."""


class TensorDigests:
    """The digests of the tensors that all ranks read; this one hashes its share of them.

    Ranks share what they read from the same files on the same machine. They must add the same tensors. A collective
    belongs to the constructor and one to `exchange`; both raise PartnerLostError when a partner is lost.
    """

    def __init__(self, files: Sequence[Path], sizes: Mapping[str, int], headers: str, hashing: Hashing) -> None:
        """Find out which ranks read the same files, and divide the tensors among them.

        Args:
            files: The model's, in order.
            sizes: Bytes by tensor name.
            headers: What must be the same on all ranks before anything is read.

        Raises:
            ModelDirectoryError: the ranks' headers differ.
        """
        self._model_dir = files[0].parent
        self._names = sorted(sizes)
        self._hashing = hashing
        self._machines = self._find_machines(files, headers)
        self._owners = [_divide(sizes, ranks) for ranks in self._machines]
        own = next(owner for owner, ranks in zip(self._owners, self._machines, strict=True) if self._rank in ranks)
        self.share = frozenset(name for name in self._names if own[name] == self._rank)
        num_threads = min(hashing.num_threads, _MAX_THREADS)
        self._pool = ThreadPoolExecutor(num_threads, "hash-weights")
        # Few, so that a tensor is hashed while it is in the page cache, and progress is not far ahead.
        self._max_unfinished = num_threads + 1
        self._unfinished: deque[Future[bytes]] = deque()
        self._added: dict[str, Future[bytes] | None] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Hash a tensor if it belongs to `share`; else leave its bytes alone.

        Other threads do it. This one waits for them once it is more than a tensor ahead of each.
        """
        if name not in self.share:
            self._added[name] = None
            return
        self._added[name] = digest = self._pool.submit(_hash, tensor)
        self._unfinished.append(digest)
        if len(self._unfinished) > self._max_unfinished:
            self._unfinished.popleft().result()

    def exchange(self) -> dict[str, bytes]:
        """The digest of every tensor added, when all ranks have hashed their shares.

        Raises:
            ModelDirectoryError: a rank has read other bytes, or has not read a tensor that this one has.
        """
        hashed = (self._added.get(name) for name in self._names)
        own = b"".join(_NOT_HASHED if digest is None else digest.result() for digest in hashed)
        gathered = self._gather(own, len(self._names))
        # [num_tensors, 32] each.
        of_machines = [self._of_machine(gathered, owner) for owner in self._owners]
        is_added = np.array([name in self._added for name in self._names], bool)
        for digests in of_machines:
            is_other = (digests != of_machines[0]).any(axis=1) | ~digests.any(axis=1)
            if (is_added & is_other).any():
                name = self._names[int(np.flatnonzero(is_added & is_other)[0])]
                raise ModelDirectoryError(f"{self._model_dir}: tensor {name} is not the same on all ranks")
        rows = zip(self._names, of_machines[0], strict=True)
        return {name: digest.tobytes() for name, digest in rows if name in self._added}

    def close(self) -> None:
        """End the threads; what they have not begun is not hashed."""
        self._pool.shutdown(cancel_futures=True)

    @property
    def _rank(self) -> int:
        return self._hashing.ranks.rank

    def _find_machines(self, files: Sequence[Path], headers: str) -> list[list[int]]:
        """The ranks that read the same files, machine by machine."""
        own = _identify(files) + hashlib.sha256(headers.encode()).digest()
        rows = [row.tobytes() for row in self._gather(own, 1)[0]]
        if len({row[_DIGEST_BYTES:] for row in rows}) > 1:
            raise ModelDirectoryError(
                f"{self._model_dir}: the tensors' names, dtypes and shapes are not the same on all ranks"
            )
        machines: dict[bytes, list[int]] = {}
        for rank, row in enumerate(rows):
            machines.setdefault(row[:_DIGEST_BYTES], []).append(rank)
        return list(machines.values())

    def _gather(self, own: bytes, num_rows: int) -> npt.NDArray[np.uint8]:
        """All ranks' bytes: [num_rows, ranks, bytes of a row]."""
        ranks = self._hashing.ranks
        rows = torch.frombuffer(bytearray(own), dtype=torch.uint8).view(num_rows, -1).to(self._hashing.device)
        gathered = ranks.all_gather(rows, (rows.shape[1],) * ranks.size)
        return gathered.cpu().view(num_rows, ranks.size, -1).numpy()

    def _of_machine(self, gathered: npt.NDArray[np.uint8], owner: Mapping[str, int]) -> npt.NDArray[np.uint8]:
        return gathered[np.arange(len(self._names)), [owner[name] for name in self._names]]


def _divide(sizes: Mapping[str, int], ranks: Sequence[int]) -> dict[str, int]:
    """Which rank hashes each tensor: the largest first, each to the rank with the fewest bytes so far."""
    loads = [(0, rank) for rank in ranks]
    name_to_rank = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + sizes[name], rank))
        name_to_rank[name] = rank
    return name_to_rank


def _identify(files: Sequence[Path]) -> bytes:
    """32 bytes that only ranks have in common that read the same files through the same page cache."""
    try:
        stats = [path.stat() for path in files]
    except OSError as error:
        raise ModelDirectoryError(str(error)) from error
    try:
        machine = _BOOT_ID.read_bytes()
    except OSError:
        # Not Linux: every rank is taken for another machine's.
        machine = os.urandom(_DIGEST_BYTES)
    lines = (f"{each.st_dev} {each.st_ino} {each.st_size} {each.st_mtime_ns}" for each in stats)
    return hashlib.sha256(machine + "\n".join(lines).encode()).digest()


def _hash(tensor: Tensor) -> bytes:
    """SHA-256 of the tensor's bytes. Other threads run meanwhile."""
    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().data).digest()
