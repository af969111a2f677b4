"""Stand-ins in torch for AITER's Triton kernels, which Triton's interpreter computes wrongly in bfloat16.

They take the arguments of the launches that AITER's own functions make. Our own kernels of latent attention, which the
backend uses too, run on the same values in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.kernels.interpreter import quicken

NUM_COMPUTE_UNITS = 304


class StandIn:
    """Is launched like a kernel."""

    def __init__(self, compute: Callable[..., None]) -> None:
        self._compute = compute

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._compute


def install() -> None:
    """Replace the kernels of AITER in this process; AITER must be importable."""
    name_gpu()
    quicken(pytest.MonkeyPatch())
    attention: Any = import_module("aiter.ops.triton.unified_attention")
    attention.get_num_sms = lambda: NUM_COMPUTE_UNITS
    attention.kernel_unified_attention_2d = StandIn(_attend)
    attention.kernel_unified_attention_3d = StandIn(_attend_in_segments)
    attention.reduce_segments = StandIn(_reduce_segments)
    import_module("aiter.ops.triton.moe_op").__dict__["_fused_moe_kernel"] = StandIn(_multiply_grouped)
    _widen_latents()
    # AITER calls kernels without a tensor among their arguments with an empty one on a GPU.
    tuned: Any = import_module("aiter.tuned_gemm")
    tuned.tgemm.extensions_created = True
    tuned.get_padded_m = lambda rows, *_: rows


def name_gpu() -> None:
    """Say which GPU and which ROCm kernels are for: AITER would ask the driver and torch."""
    # Read where a kernel must be built.
    torch.version.hip = "6.4.43484"
    import_module("aiter.ops.triton.utils._triton.arch_info").__dict__["get_arch"] = lambda: "gfx942"


def _widen_latents() -> None:
    """Give our kernels float32."""
    plan: Any = import_module("services.worker.ops.triton.attention.plan")
    attend_latents, select_positions = plan.latent_attention, plan.select_positions

    def widened_attention(query: Tensor, cache: Tensor, output: Tensor, *arguments: Any, **named: Any) -> None:
        # Rows of other parts of the step are already there.
        wide = output.float()
        attend_latents(query.float(), cache.float(), wide, *arguments, **named)
        output.copy_(wide)

    def widened_selection(query: Tensor, weights: Tensor, cache: Tensor, *arguments: Any, **named: Any) -> Tensor:
        selected: Tensor = select_positions(query.float(), weights, cache.float(), *arguments, **named)
        return selected

    plan.latent_attention, plan.select_positions = widened_attention, widened_selection


def _attend(**launch: Any) -> None:
    launch["output_ptr"].copy_(_attended(launch))


def _attend_in_segments(**launch: Any) -> None:
    attended = _attended(launch)
    launch["segm_output_ptr"][:, :, 0, : attended.shape[2]] = attended


def _reduce_segments(**launch: Any) -> None:
    output = launch["output_ptr"]
    output.copy_(launch["segm_output_ptr"][:, :, 0, : output.shape[2]])


def _attended(launch: dict[str, Any]) -> Tensor:
    """[T, H, D] float32; rows of no sequence are NaN."""
    query, tables, lengths = launch["query_ptr"], launch["block_tables_ptr"], launch["seq_lens_ptr"]
    starts = launch["query_start_len_ptr"]
    key_cache, value_cache = launch["key_cache_ptr"], launch["value_cache_ptr"]
    _check_attention(launch)
    output = torch.full(query.shape, torch.nan)
    for seq, length in enumerate(lengths.tolist()):
        rows = slice(int(starts[seq]), int(starts[seq + 1]))
        slots = torch.arange(length)
        blocks = tables[seq].long()[slots // launch["BLOCK_SIZE"]]
        keys = key_cache[blocks, slots % launch["BLOCK_SIZE"]].float()
        values = value_cache[blocks, slots % launch["BLOCK_SIZE"]].float()
        output[rows] = _attend_one(query[rows].float(), keys, values, launch)
    return output


def _attend_one(query: Tensor, keys: Tensor, values: Tensor, launch: dict[str, Any]) -> Tensor:
    group = launch["num_queries_per_kv"]
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * launch["scale"]
    positions = torch.arange(len(keys) - len(query), len(keys))[:, None]
    places = torch.arange(len(keys))
    is_hidden = places > positions
    if launch["SLIDING_WINDOW"] > 0:
        is_hidden |= positions - places >= launch["SLIDING_WINDOW"]
    scores.masked_fill_(is_hidden, float("-inf"))
    if launch["USE_SINKS"]:
        sinks = launch["sink_ptr"].float()[:, None, None].expand(-1, len(query), 1)
        scores = torch.cat((scores, sinks), dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1)[..., : len(keys)], values)


def _check_attention(launch: dict[str, Any]) -> None:
    query, key_cache = launch["query_ptr"], launch["key_cache_ptr"]
    for name in ("block_tables_ptr", "seq_lens_ptr", "query_start_len_ptr"):
        assert launch[name].dtype == torch.int32, f"{name} has {launch[name].dtype}"
    assert query.dtype == key_cache.dtype == launch["value_cache_ptr"].dtype
    assert key_cache.shape[1:] == (launch["BLOCK_SIZE"], key_cache.shape[2], query.shape[2]), "not in flash layout"
    assert query.stride(2) == 1
    # Whole tiles are read of each row of the block tables.
    tile = launch["TILE_SIZE"]
    width = launch["block_tables_ptr"].shape[1] * launch["BLOCK_SIZE"]
    longest = int(launch["seq_lens_ptr"].max())
    assert -(-longest // tile) * tile <= width, "the last tile reaches past the block tables"


def _multiply_grouped(*positional: Any, **launch: Any) -> None:
    """The arguments of `_fused_moe_kernel`."""
    x, matrices, output, _, _, _, rows, tile_experts, num_padded = positional[:9]
    assert rows.dtype == tile_experts.dtype == num_padded.dtype == torch.int32
    tile, rows_per_token = launch["BLOCK_SIZE_M"], launch["top_k"]
    flat_output = output.flatten(0, 1)
    for start in range(0, int(num_padded), tile):
        chosen = rows[start : start + tile].long()
        chosen = chosen[chosen < len(flat_output)]
        matrix = matrices[int(tile_experts[start // tile])]
        flat_output[chosen] = (x[chosen // rows_per_token].float() @ matrix.float().T).to(output.dtype)
