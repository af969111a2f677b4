"""Prints what the native kernels use where the system refuses a process the use of tiles.

`python -m tests.support.kernels.without_tiles`: the sets of instructions, then those of the backend, then what becomes
of `--native-isa amx`.
"""

from __future__ import annotations

import ctypes
import sys
from struct import pack

from services.worker.device import DeviceError
from services.worker.ops import load_ops
from services.worker.ops.native.isa import available_isas

# linux/prctl.h, linux/seccomp.h, linux/filter.h and asm/unistd_64.h.
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 22, 38, 2
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050001
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM = 158, 0x1023


def refuse_tiles() -> None:
    """Have the system refuse ARCH_REQ_XCOMP_PERM from now on, with EPERM."""
    steps = [
        (_LOAD_WORD, 0, 0, 0),
        (_JUMP_IF_EQUAL, 0, 3, _SYS_ARCH_PRCTL),
        # The low half of the first argument.
        (_LOAD_WORD, 0, 0, 16),
        (_JUMP_IF_EQUAL, 0, 1, _ARCH_REQ_XCOMP_PERM),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(pack("HxxxxxxQ", len(steps), ctypes.addressof(code)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    arguments = [(_PR_SET_NO_NEW_PRIVS, 1, 0), (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(program))]
    for option, first, second in arguments:
        if prctl(option, ctypes.c_ulong(first), ctypes.c_ulong(second), 0, 0) != 0:
            sys.exit("the system takes no filter of its calls")


def main() -> None:
    """Refuse tiles, then look."""
    refuse_tiles()
    ops = load_ops("native")
    try:
        load_ops("native", "amx")
        outcome = "used"
    except DeviceError:
        outcome = "refused"
    print(*(isa.value for isa in available_isas()), ops.numerics().split()[2], outcome)  # noqa: T201


if __name__ == "__main__":
    main()
