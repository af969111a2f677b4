"""Launches of the sampling kernels with the shapes of published models, for checks that only compile them."""

from __future__ import annotations

import torch
from torch import Tensor

from services.worker.ops import DrawRows
from services.worker.ops.triton.sampling.edits import AllowMasks, Edits, apply_edits, apply_masks
from services.worker.ops.triton.sampling.greedy import greedy_sample
from services.worker.ops.triton.sampling.sample import sample
from services.worker.ops.triton.sampling.token_logprobs import token_logprobs
from shared.request.sampling_params import MAX_LOGPROBS

# Those of Llama 3, Qwen3 and, with rows that begin at any address of four bytes, Whisper.
VOCABULARIES = (128_256, 151_936, 51_865)


def launch_sampling() -> None:
    """Every sampling kernel, for one row and for 256."""
    for num_columns in VOCABULARIES:
        for num_rows in (1, 256):
            launch_step(num_rows, num_columns)


def launch_step(num_rows: int, num_columns: int) -> None:
    """One step's launches: edits, draws and log-probabilities."""
    logits = on_meta(torch.float32, num_rows, num_columns)
    num_words = (num_columns + 31) // 32
    apply_masks(logits, AllowMasks(on_meta(torch.int32, num_rows), on_meta(torch.int32, num_rows, num_words)))
    ids = on_meta(torch.int32, 4 * num_rows)
    apply_edits(logits, Edits(rows=ids, token_ids=ids, kinds=ids, values=on_meta(torch.float32, 4 * num_rows)))
    sample(logits, draw_rows(num_rows))
    greedy_sample(logits)
    for num_top in (0, MAX_LOGPROBS):
        for num_own in (1, 1 + MAX_LOGPROBS):
            token_logprobs(logits, on_meta(torch.int64, num_rows, num_own), num_top)


def draw_rows(num_rows: int) -> DrawRows:
    """Rows without contents."""
    return DrawRows(
        temperature=on_meta(torch.float32, num_rows),
        top_k=on_meta(torch.int32, num_rows),
        top_p=on_meta(torch.float32, num_rows),
        min_p=on_meta(torch.float32, num_rows),
        seed=on_meta(torch.int64, num_rows),
        choice=on_meta(torch.int64, num_rows),
        position=on_meta(torch.int64, num_rows),
    )


def on_meta(dtype: torch.dtype, *shape: int) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")
