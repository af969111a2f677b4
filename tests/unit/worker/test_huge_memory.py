"""Memory in huge pages, as the kernel tells of it."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

import pytest
import torch

from services.worker.forward.kv_cache import zeros
from services.worker.huge_memory import huge_memory

_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")


def flags_at(address: int) -> list[str]:
    """What the kernel says of this process's mapping at an address: `VmFlags`, see proc_pid_smaps(5)."""
    lines = iter(Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines())
    for line in lines:
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if found is not None and int(found[1], 16) <= address < int(found[2], 16):
            return next(each for each in lines if each.startswith("VmFlags:")).split()[1:]
    raise AssertionError("nothing is mapped there")


@pytest.mark.skipif(not _SETTINGS.exists(), reason="the kernel has no huge pages")
def test_the_kernel_may_use_huge_pages_for_private_memory() -> None:
    memory = huge_memory(1)
    flags = flags_at(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    assert "hg" in flags
    assert "sh" not in flags


def test_it_is_memory_where_the_kernel_has_no_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError

    monkeypatch.setattr(mmap, "mmap", Refused)
    cache = zeros((2, 3), torch.float32, torch.device("cpu"))
    assert torch.equal(cache, torch.zeros(2, 3))
