"""What ops are given besides single tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shared.request.sampling_params import NO_OPTIONS, SamplingOptions

_HostColumn = npt.NDArray[np.generic]

# Dtypes of columns.
_FLOAT32, _INT32, _INT64 = ({"dtype": dtype} for dtype in (torch.float32, torch.int32, torch.int64))
_HOST_DTYPES = {torch.float32: np.float32, torch.int32: np.int32, torch.int64: np.int64}


@dataclass(frozen=True, slots=True)
class RopeRows:
    """What `rope` needs for one step's positions.

    A backend whose kernel looks up positions itself stores whole tables and the positions here.
    """

    cos: Tensor
    sin: Tensor
    positions: Tensor
    is_interleaved: bool
    """Whether columns 2 i and 2 i + 1 form a pair; otherwise i and i + rotary_dim / 2."""


class Activation(Enum):
    """What a gated feed-forward network applies to its gate."""

    SILU = "silu"
    """`x * sigmoid(x)`. Source: arXiv:1702.03118, equation 5."""
    GELU_TANH = "gelu_tanh"
    """`x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x³)))`. Source: arXiv:1606.08415, section 2."""


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm of each query and key head before its rotation. Source: arXiv:2505.09388, section 2 (QK-Norm)."""

    query: Tensor
    """[D], the dtype of the heads or float32."""
    key: Tensor
    """[D], likewise."""
    eps: float


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """A layer's attention parameters besides the shapes of its tensors."""

    scale: float
    """Multiplies the products of queries and keys."""
    window: int | None = None
    """A token sees itself and the `window` - 1 tokens before it; None means all tokens before it."""
    sinks: Tensor | None = None
    """[H] float32: a logit per query head that joins the softmax's sum without a value. Source: arXiv:2508.10925."""


@dataclass(frozen=True, slots=True)
class DeltaGates:
    """A layer's parameters of the two gates of each value head; see `RecurrentOps.gated_delta_rule`."""

    decay: Tensor
    """[V] float32, below 0: what the logarithm of a state's decay is a multiple of."""
    bias: Tensor
    """[V] float32."""
    is_tiled: bool = False
    """Whether value head v belongs to key head `v % K`, instead of `v // (V / K)`."""


@dataclass(frozen=True, slots=True)
class DrawRows:
    """How the token of each row is drawn; see `TokenDraw`. On the device of the logits, contiguous.

    The columns, in this order and with these dtypes, are the layout of `native`'s structure of this name and of what
    `triton`'s kernels are given by name. A column that `SamplingOptions` has too is filled from it.
    """

    temperature: Tensor = field(metadata=_FLOAT32)  # [B], below 1e-5: greedy
    top_k: Tensor = field(metadata=_INT32)  # [B], 0: all
    top_p: Tensor = field(metadata=_FLOAT32)  # [B], 1: all
    min_p: Tensor = field(metadata=_FLOAT32)  # [B], 0: all
    seed: Tensor = field(metadata=_INT64)  # [B], the bits of the unsigned seed
    choice: Tensor = field(metadata=_INT64)  # [B]
    position: Tensor = field(metadata=_INT64)  # [B]

    @classmethod
    @cache
    def dtypes(cls) -> dict[str, torch.dtype]:
        """The columns' names and dtypes, in order."""
        return {each.name: each.metadata["dtype"] for each in fields(cls)}

    @classmethod
    def option_columns(cls, num_rows: int, row_to_options: Mapping[int, SamplingOptions]) -> dict[str, _HostColumn]:
        """The columns, on the host, that are filled from the options of rows; rows without any have those of none."""
        columns: dict[str, _HostColumn] = {}
        for name, dtype in cls.dtypes().items():
            if hasattr(NO_OPTIONS, name):
                values = np.full(num_rows, getattr(NO_OPTIONS, name), _HOST_DTYPES[dtype])
                for row, options in row_to_options.items():
                    values[row] = getattr(options, name)
                columns[name] = values
        return columns

    @property
    def columns(self) -> dict[str, Tensor]:
        """The columns by their names, in order."""
        return {name: getattr(self, name) for name in self.dtypes()}

    @classmethod
    def greedy(cls, num_rows: int, device: torch.device) -> DrawRows:
        """Rows to be written; until then they are greedy ones at position 0."""
        dtypes = cls.dtypes().items()
        return cls(**{name: torch.zeros(num_rows, dtype=dtype, device=device) for name, dtype in dtypes})

    def write(self, rows: DrawRows) -> None:
        """Copy as many rows, in place."""
        for name, column in self.columns.items():
            column.copy_(getattr(rows, name))

    def first(self, num_rows: int) -> DrawRows:
        """Views of the first rows."""
        return DrawRows(**{name: column[:num_rows] for name, column in self.columns.items()})


@dataclass(frozen=True, slots=True)
class SlotColumns:
    """What the device knows of a batch's sequences, by slot. Contiguous."""

    last_token: Tensor
    """[num_slots] int64: the token drawn last, which the next decode computes."""
    position: Tensor
    """[num_slots] int64: its position. The cache holds all tokens before it."""
    block_tables: Tensor
    """[num_slots, most blocks so far] int32."""


@dataclass(frozen=True, slots=True)
class RunRows:
    """Runs of consecutive tokens, one for each row, at positions that only the device may know. Contiguous."""

    firsts: Tensor  # [num_rows] int64: the position of each run's first token
    starts: Tensor  # [num_rows + 1] int32: row i has the tokens [starts[i], starts[i + 1]), at least one
    stored_from: Tensor  # [num_rows] int64: tokens before this position are not stored
    ends: Tensor
    """[num_rows] int64, at least 1: nor are those from this position on, and what computes them is the token before."""
    block_tables: Tensor  # [num_rows, at least the blocks of what is before the last end] int32


@dataclass(frozen=True, slots=True)
class RunPlaces:
    """Where the tokens of runs are in some passes over them; see `AttentionMetadata`. Contiguous."""

    positions: Tensor  # [num_passes, num_tokens] int64
    slot_mapping: Tensor  # [num_passes, num_tokens] int64
    context_lens: Tensor  # [num_passes, num_rows] int32

    @classmethod
    def empty(cls, num_passes: int, num_tokens: int, num_rows: int, device: torch.device) -> RunPlaces:
        """Places to be written."""
        positions, slot_mapping = torch.empty(2, num_passes, num_tokens, dtype=torch.int64, device=device).unbind()
        context_lens = torch.empty(num_passes, num_rows, dtype=torch.int32, device=device)
        return cls(positions, slot_mapping, context_lens)


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Inputs of a decode step of one token for each row; see `AttentionMetadata`. Contiguous."""

    token_ids: Tensor  # [num_rows] int64
    positions: Tensor  # [num_rows] int64
    draw_positions: Tensor  # [num_rows] int64: where the rows' next tokens are drawn
    slot_mapping: Tensor  # [num_rows] int64
    context_lens: Tensor  # [num_rows] int32
    block_tables: Tensor  # [num_rows, at least the blocks of the longest context] int32

    @classmethod
    def padding(cls, num_rows: int, num_blocks: int, device: torch.device) -> DecodeRows:
        """Padding, with room for `num_blocks` blocks in each row."""
        return cls(
            token_ids=torch.zeros(num_rows, dtype=torch.int64, device=device),
            positions=torch.zeros(num_rows, dtype=torch.int64, device=device),
            draw_positions=torch.zeros(num_rows, dtype=torch.int64, device=device),
            slot_mapping=torch.full((num_rows,), -1, dtype=torch.int64, device=device),
            context_lens=torch.ones(num_rows, dtype=torch.int32, device=device),
            block_tables=torch.zeros(num_rows, num_blocks, dtype=torch.int32, device=device),
        )

    @classmethod
    def empty(cls, num_rows: int, num_blocks: int, device: torch.device) -> DecodeRows:
        """Rows to be written, with room for `num_blocks` blocks each."""
        token_ids, positions, draw_positions, slot_mapping = torch.empty(
            4, num_rows, dtype=torch.int64, device=device
        ).unbind()
        context_lens = torch.empty(num_rows, dtype=torch.int32, device=device)
        block_tables = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=device)
        return cls(token_ids, positions, draw_positions, slot_mapping, context_lens, block_tables)

    def first(self, num_rows: int) -> DecodeRows:
        """Views of the first rows."""
        return DecodeRows(
            self.token_ids[:num_rows],
            self.positions[:num_rows],
            self.draw_positions[:num_rows],
            self.slot_mapping[:num_rows],
            self.context_lens[:num_rows],
            self.block_tables[:num_rows],
        )
