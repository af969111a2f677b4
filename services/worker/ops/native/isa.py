"""Which instructions the kernels are compiled for."""

from __future__ import annotations

import ctypes
import enum
import platform
from functools import cache
from pathlib import Path

_AVX2 = ("avx2", "fma", "f16c", "bmi2")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni")
_AVX512_BF16 = (*_AVX512, "avx512_bf16")
_AMX = (*_AVX512_BF16, "amx_tile", "amx_int8", "amx_bf16")
_MULTIPLY_BF16 = "-DMULTIPLY_BF16"
_USE_AMX = "-DUSE_AMX"

# Linux, Documentation/arch/x86/xstate.rst: a process asks for the state of tiles before it uses them.
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


class Isa(enum.Enum):
    """A set of instructions; each is a part of the next. The value is the setting's."""

    AVX2 = "avx2"
    AVX512 = "avx512"
    """AVX-512 with VNNI."""
    AVX512_BF16 = "avx512_bf16"
    AMX = "amx"
    """The same with the tile unit, whose use the system permits."""

    @property
    def cpu_flags(self) -> tuple[str, ...]:
        """What /proc/cpuinfo calls the instructions."""
        return {Isa.AVX2: _AVX2, Isa.AVX512: _AVX512, Isa.AVX512_BF16: _AVX512_BF16, Isa.AMX: _AMX}[self]

    @property
    def has_bf16(self) -> bool:
        """Whether it has instructions for bfloat16."""
        return "avx512_bf16" in self.cpu_flags

    @property
    def compiler_flags(self) -> tuple[str, ...]:
        """What g++ and clang++ call them, and whether products of bfloat16 pay on this processor."""
        flags = _instruction_flags(self)
        return (*flags, _MULTIPLY_BF16) if self is Isa.AVX512_BF16 and _multiplies_bf16_fast() else flags


def every_compiler_flags() -> list[tuple[str, ...]]:
    """What `Isa.compiler_flags` may be on any processor of this machine's architecture; empty if it has no kernels."""
    if platform.machine() != "x86_64":
        return []
    return [*map(_instruction_flags, Isa), (*_instruction_flags(Isa.AVX512_BF16), _MULTIPLY_BF16)]


def available_isas() -> list[Isa]:
    """What this machine can run, ascending; empty if kernels cannot run on it at all."""
    if platform.machine() != "x86_64":
        return []
    flags = set(_cpuinfo("flags").split())
    isas = [isa for isa in Isa if flags.issuperset(isa.cpu_flags)]
    return [isa for isa in isas if isa is not Isa.AMX or may_use_tiles()]


@cache
def may_use_tiles() -> bool:
    """Ask the system for tiles, once for this process and what it forks; False if it refuses, or does not know them."""
    request = map(ctypes.c_long, (_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA))
    return bool(ctypes.CDLL(None).syscall(*request) == 0)


def _multiplies_bf16_fast() -> bool:
    """Whether a product of 32 bfloat16 pairs is faster than two of 16 float32.

    On Intel's processors it takes twice as long as those two: 0.44 and 1.76 of them begin in a cycle (a Xeon 6).
    """
    return _cpuinfo("vendor_id") == "AuthenticAMD"


def _cpuinfo(key: str) -> str:
    """The first processor's value; empty if it has none."""
    lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def _instruction_flags(isa: Isa) -> tuple[str, ...]:
    names = (flag.replace("avx512_", "avx512").replace("amx_", "amx-") for flag in isa.cpu_flags)
    return (*(f"-m{name}" for name in names), *([_USE_AMX] if isa is Isa.AMX else []))
