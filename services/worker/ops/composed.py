"""Ops made of other ops or of torch's functions, for backends that have no kernel of their own for them.

A function whose first argument is `ops` is composed of that backend's other ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.device import DeviceError
from services.worker.drawing.row_edits import RowEdits
from services.worker.drawing.row_logprobs import row_logprobs
from services.worker.drawing.token_draw import GREEDY_TEMPERATURE, TokenDraw
from services.worker.forward.capture import Capture, CudaCapture
from services.worker.forward.forward_context import AttentionPlan
from services.worker.forward.kv_cache import LayerCache
from services.worker.forward.staging import to_device
from services.worker.ops.arguments import (
    Activation,
    AttentionParams,
    DecodeRows,
    DrawRows,
    HeadNorms,
    RopeRows,
    RunPlaces,
    RunRows,
    SlotColumns,
)
from services.worker.ops.matrices import Matrix, dense
from services.worker.ops.protocol import EmbeddingKernel, LinearKernel, Ops, PerHeadKernel

FLOAT_DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
"""What kernels that know no dtype compute in."""


class DrawingOps(Protocol):
    """What `sample` is composed of."""

    def greedy_sample(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The column of each row's largest logit, and that logit; both [num_rows]."""

    def draw(self, logits: Tensor, rows: DrawRows, drawn: Tensor, token_ids: Tensor) -> None:
        """Draw the rows `drawn`, [n] int64, which are finite and not greedy.

        Args:
            token_ids: The columns of the largest logits; replaced, in place, by the drawn ones.
        """


# -- Backend ----------------------------------------------------------------------------------------------


def num_threads(ops: Ops) -> int:
    """Torch's threads."""
    return torch.get_num_threads()


def use_threads(count: int) -> None:
    """Set torch's threads."""
    torch.set_num_threads(count)


def refuse_quantized_activations(ops: Ops) -> None:
    """Raise `DeviceError`: there are no kernels for it."""
    raise DeviceError(f"--activation-quantization fp8: the backend {ops.name} has no kernels for it, but triton has")


def capture_graphs(device: torch.device, layers: Sequence[LayerCache]) -> Capture | None:
    """Capture a GPU's graphs; None on a CPU."""
    return CudaCapture() if device.type == "cuda" else None


# -- Batch ------------------------------------------------------------------------------------------------


def advance_batch(columns: SlotColumns, slots: Tensor, rows: DecodeRows, *, block_size: int, num_blocks: int) -> None:
    """Advance the batch with torch, a call for each column."""
    num_rows = len(slots)
    if num_rows < len(rows.token_ids):
        _pad(rows, num_rows)
        rows = rows.first(num_rows)
    positions = torch.index_select(columns.position, 0, slots, out=rows.positions)
    torch.index_select(columns.last_token, 0, slots, out=rows.token_ids)
    torch.add(positions, 1, out=rows.draw_positions)
    rows.context_lens.copy_(rows.draw_positions)
    columns.position.index_copy_(0, slots, rows.draw_positions)
    tables = columns.block_tables
    rows.block_tables[:, :num_blocks] = tables.index_select(0, slots)[:, :num_blocks]
    block_ids = tables.take(slots * tables.shape[1] + positions // block_size)
    torch.add(positions % block_size, block_ids, alpha=block_size, out=rows.slot_mapping)


def place_runs(runs: RunRows, num_tokens: int, *, block_size: int, num_passes: int) -> RunPlaces:
    """Find the places with torch."""
    device, tables = runs.firsts.device, runs.block_tables
    tokens, starts = torch.arange(num_tokens, device=device), runs.starts[:-1].long()
    rows = torch.searchsorted(runs.starts[1:].long(), tokens, right=True)
    wanted = tokens + (runs.firsts - starts)[rows] + torch.arange(num_passes, device=device)[:, None]
    positions = torch.minimum(wanted, runs.ends[rows] - 1)
    block_ids = tables.take(rows * tables.shape[1] + positions // block_size).long()
    is_stored = (positions == wanted) & (wanted >= runs.stored_from[rows])
    slot_mapping = (block_ids * block_size + positions % block_size).masked_fill(~is_stored, -1)
    context_lens = positions.index_select(1, runs.starts[1:] - 1).int() + 1
    return RunPlaces(positions, slot_mapping, context_lens)


# -- Weights ----------------------------------------------------------------------------------------------


def prepare_embedding(weight: Matrix, dtype: torch.dtype) -> EmbeddingKernel:
    """Prepare a lookup in the dense matrix."""
    return partial(F.embedding, weight=dense(weight, dtype))


def prepare_head(ops: Ops, weight: Matrix, dtype: torch.dtype) -> LinearKernel:
    """Prepare a linear layer."""
    return ops.prepare_linear(weight, None, dtype)


def prepare_tied(ops: Ops, weight: Matrix, dtype: torch.dtype) -> tuple[EmbeddingKernel, LinearKernel]:
    """Prepare both with the dense matrix, which is kept twice if `prepare_linear` copies."""
    table = dense(weight, dtype)
    return ops.prepare_embedding(table, dtype), ops.prepare_head(table, dtype)


def prepare_per_head_linear(weight: Tensor) -> PerHeadKernel:
    """Prepare a batched product."""
    return partial(_per_head_linear, weight=weight.transpose(1, 2).contiguous())


# -- Elementwise and norm ---------------------------------------------------------------------------------


def activate(gate: Tensor, activation: Activation) -> Tensor:
    """The activation alone, as a new tensor."""
    return F.silu(gate) if activation is Activation.SILU else F.gelu(gate, approximate="tanh")


def scale(x: Tensor, factor: float) -> Tensor:
    """Multiply in place."""
    return x.mul_(factor)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Call torch's, in the dtype of the weight."""
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)


# -- Attention --------------------------------------------------------------------------------------------


def check_block_size(block_size: int) -> None:
    """Accept any size."""
    assert block_size >= 1


def norm_rope_write(
    ops: Ops,
    qkv: Tensor,
    norms: HeadNorms | None,
    rows: RopeRows,
    *,
    num_heads: int,
    cache: tuple[Tensor, ...],
    plan: AttentionPlan,
) -> None:
    """Call the three ops, one after the other; the key is written in place too."""
    num_kv_heads = cache[0].shape[2]
    query, key, value = torch.split(qkv, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if norms is not None:
        query.copy_(ops.rms_norm(query, norms.query, norms.eps))
        key.copy_(ops.rms_norm(key, norms.key, norms.eps))
    ops.rope(qkv[:, : num_heads + num_kv_heads], rows)
    ops.write_kv(key, value, cache, plan)


def prefill_attention(
    ops: Ops,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: tuple[Tensor, ...],
    plan: AttentionPlan,
    params: AttentionParams,
) -> Tensor:
    """Attend as in a decode: only the cache is read, so that a cached prefix takes the path of one just computed."""
    return ops.decode_attention(query, cache, plan, params)


# -- Sampling ---------------------------------------------------------------------------------------------


def edit_logits(logits: Tensor, edits: Sequence[RowEdits]) -> None:
    """Edit row by row on the host."""
    for row, row_edits in zip(logits, edits, strict=True):
        row.copy_(torch.from_numpy(row_edits.apply(row.cpu().numpy())))


def sample(ops: DrawingOps, logits: Tensor, rows: DrawRows) -> tuple[Tensor, Tensor]:
    """Take greedy rows together, the others by `draw`."""
    token_ids, largest = ops.greedy_sample(logits)
    is_finite = largest.isfinite()
    drawn = ((rows.temperature >= GREEDY_TEMPERATURE) & is_finite).nonzero().flatten()
    if len(drawn):
        ops.draw(logits, rows, drawn, token_ids)
    return token_ids, is_finite


def draw(logits: Tensor, rows: DrawRows, drawn: Tensor, token_ids: Tensor) -> None:
    """Draw row by row on the host; see `DrawingOps`."""
    values = (logits[drawn] if len(drawn) < len(logits) else logits).cpu().numpy()
    draws = _draws(rows, drawn)
    tokens = [draw.token(row, position) for row, (draw, position) in zip(values, draws, strict=True)]
    token_ids[drawn] = torch.tensor(tokens, device=token_ids.device)


def greedy_sample(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Take torch's largest."""
    largest, token_ids = logits.max(dim=-1)
    return token_ids, largest


def accept(drawn: Tensor, wanted: Tensor, firsts: Tensor) -> tuple[Tensor, Tensor]:
    """Find each run's end with torch: the smallest place from its first one on that ends a run."""
    goes_on = (drawn == wanted) & (drawn >= 0)
    goes_on[:-1] &= drawn[1:] >= 0
    places = torch.arange(len(drawn), device=drawn.device)
    ends = torch.where(goes_on, len(drawn), places).flip(0).cummin(0).values.flip(0).index_select(0, firsts)
    return ends - firsts + 1, drawn.index_select(0, ends)


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute row by row on the host."""
    num_top = min(num_top, logits.shape[1])
    shape = len(logits), token_ids.shape[1] + num_top
    entries, values = np.empty(shape, np.int32), np.empty(shape, np.float32)
    ranks = np.empty(token_ids.shape, np.int32)
    for place, (row, own_ids) in enumerate(zip(logits.cpu().numpy(), token_ids.tolist(), strict=True)):
        entries[place], values[place], ranks[place] = row_logprobs(row, own_ids, num_top)
    device = logits.device
    return to_device(entries, device), to_device(values, device), to_device(ranks, device)


def _per_head_linear(x: Tensor, *, weight: Tensor) -> Tensor:
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)


def _pad(rows: DecodeRows, num_rows: int) -> None:
    """Make padding of the rows from `num_rows` on."""
    for values in (rows.token_ids, rows.positions, rows.draw_positions):
        values[num_rows:].zero_()
    rows.slot_mapping[num_rows:].fill_(-1)
    rows.context_lens[num_rows:].fill_(1)
    rows.block_tables[num_rows:, :1].zero_()


def _draws(rows: DrawRows, drawn: Tensor) -> list[tuple[TokenDraw, int]]:
    """How the `drawn` rows are drawn, and their positions."""
    columns = {name: column[drawn].tolist() for name, column in rows.columns.items()}
    positions = columns.pop("position")
    columns["seed"] = [seed % 2**64 for seed in columns["seed"]]
    draws = (TokenDraw(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True))
    return list(zip(draws, positions, strict=True))
