"""The numbers by which services name things to each other, as types: one of them is never taken for another."""

from __future__ import annotations

from typing import NewType

RequestHandle = NewType("RequestHandle", int)
"""A client's number for one choice of a request, unsigned 32 bits; choice i of a request has its handle + i."""

Slot = NewType("Slot", int)
"""A sequence's place in a rank's running batch, from 0 to `max_num_seqs` - 1."""

DpRank = NewType("DpRank", int)
"""A data-parallel rank of a cell, from 0."""


def choice_handles(handle: RequestHandle, n: int) -> list[RequestHandle]:
    """The handles of a request's `n` choices, given that of the first."""
    return [RequestHandle(number) for number in range(handle, handle + n)]
