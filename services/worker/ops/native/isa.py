"""Which instructions the kernels are compiled for."""

from __future__ import annotations

import enum
import platform
from pathlib import Path

_AVX2 = ("avx2", "fma", "f16c", "bmi2")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni")
_AVX512_BF16 = (*_AVX512, "avx512_bf16")
_MULTIPLY_BF16 = "-DMULTIPLY_BF16"


class Isa(enum.Enum):
    """A set of instructions; each is a part of the next. The value is the setting's."""

    AVX2 = "avx2"
    AVX512 = "avx512"
    """With VNNI."""
    AVX512_BF16 = "avx512_bf16"

    @property
    def cpu_flags(self) -> tuple[str, ...]:
        """What /proc/cpuinfo calls the instructions."""
        return {Isa.AVX2: _AVX2, Isa.AVX512: _AVX512, Isa.AVX512_BF16: _AVX512_BF16}[self]

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
    return [isa for isa in Isa if flags.issuperset(isa.cpu_flags)]


def _instruction_flags(isa: Isa) -> tuple[str, ...]:
    return tuple(f"-m{flag.replace('avx512_', 'avx512')}" for flag in isa.cpu_flags)


def _multiplies_bf16_fast() -> bool:
    """Whether a product of 32 bfloat16 pairs is faster than two of 16 float32.

    On Intel's processors it takes twice as long as those two: 0.44 and 1.76 of them begin in a cycle (a Xeon 6).
    """
    return _cpuinfo("vendor_id") == "AuthenticAMD"


def _cpuinfo(key: str) -> str:
    """The first processor's value; empty if it has none."""
    lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")
