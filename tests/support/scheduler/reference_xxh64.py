"""XXH64 in plain Python, from its specification: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md."""

from __future__ import annotations

_P1, _P2, _P3, _P4, _P5 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
_MASK = 2**64 - 1


def xxh64(data: bytes) -> int:
    """The hash of `data` with seed 0."""
    num_stripes, rest = len(data) // 32, len(data) // 32 * 32
    acc = _P5
    if num_stripes:
        lanes = [(_P1 + _P2) & _MASK, _P2, 0, -_P1 & _MASK]
        for start in range(0, rest, 32):
            lanes = [_round(lane, _word(data, start + 8 * index, 8)) for index, lane in enumerate(lanes)]
        acc = sum(_rotate(lane, count) for lane, count in zip(lanes, (1, 7, 12, 18), strict=True)) & _MASK
        for lane in lanes:
            acc = ((acc ^ _round(0, lane)) * _P1 + _P4) & _MASK
    return _avalanche(_add_rest((acc + len(data)) & _MASK, data[rest:]))


def _add_rest(acc: int, data: bytes) -> int:
    while len(data) >= 8:
        acc = (_rotate(acc ^ _round(0, _word(data, 0, 8)), 27) * _P1 + _P4) & _MASK
        data = data[8:]
    if len(data) >= 4:
        acc = (_rotate(acc ^ _word(data, 0, 4) * _P1 & _MASK, 23) * _P2 + _P3) & _MASK
        data = data[4:]
    for byte in data:
        acc = _rotate(acc ^ byte * _P5 & _MASK, 11) * _P1 & _MASK
    return acc


def _avalanche(acc: int) -> int:
    acc = (acc ^ acc >> 33) * _P2 & _MASK
    acc = (acc ^ acc >> 29) * _P3 & _MASK
    return acc ^ acc >> 32


def _round(acc: int, word: int) -> int:
    return _rotate((acc + word * _P2) & _MASK, 31) * _P1 & _MASK


def _rotate(value: int, count: int) -> int:
    return (value << count | value >> 64 - count) & _MASK


def _word(data: bytes, start: int, size: int) -> int:
    return int.from_bytes(data[start : start + size], "little")
