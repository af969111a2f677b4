"""Ops with weights, and those after the head: products, experts and sampling."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from services.worker.ops import (
    DecodeRows,
    DrawRows,
    ExpertsKernel,
    ExpertWeights,
    LinearKernel,
    RouterScore,
    RoutingRule,
    SlotColumns,
)
from services.worker.ops.matrices import Matrix
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.ops.routing import route
from services.worker.weights.dummy_weights import DummyWeights
from services.worker.weights.model_weights import WeightFormats
from services.worker.weights.quantization.config import QuantizationConfig
from tests.bench.gpu.kernels.sizes import Ground, Launch, Op, with_conch

_TOP_K, _TOP_P, _TEMPERATURE = 20, 0.95, 0.6


def product_ops(ground: Ground) -> Iterator[Op]:
    """Products with packed weights, beside torch's with plain ones of the same shape."""
    sizes = ground.sizes
    shape = (2 * sizes.inner, sizes.hidden)
    plain = ground.random(*shape)
    for name, matrix in _packed_matrices(ground, shape).items():
        kernel = ground.ops.prepare_linear(matrix, None, ground.dtype)
        for num_rows in sizes.product_rows:
            yield _product(ground, f"linear {name} {num_rows} x {shape[1]} x {shape[0]}", kernel, plain, num_rows)


def _product(ground: Ground, name: str, kernel: LinearKernel, plain: Tensor, num_rows: int) -> Op:
    x = ground.random(num_rows, plain.shape[1])
    yardsticks: dict[str, Launch] = {"torch, plain": lambda: F.linear(x, plain)}
    if " int4 " in name:
        # With codes of its own: eight in a word along the input.
        num_outputs, num_inputs = plain.shape
        words = torch.randint(0, 2**31 - 1, (num_inputs // 8, num_outputs), dtype=torch.int32, device=ground.device)
        scales = ground.random(num_inputs // ground.sizes.group_size, num_outputs)
        group_size = ground.sizes.group_size
        yardsticks = with_conch(
            yardsticks, "quantization.gemm", "mixed_precision_gemm", x, words, scales, None, 4, 8, group_size
        )
    return Op(name, lambda: kernel(x), yardsticks)


def expert_ops(ground: Ground) -> Iterator[Op]:
    """Routing, experts and their sums; torch's grouped products get rows that are sorted before, and add up nothing."""
    sizes, ops = ground.sizes, ground.ops
    hidden, inner, num_experts = sizes.expert_hidden, sizes.expert_inner, sizes.num_experts
    gate_up, down = ground.random(num_experts, 2 * inner, hidden), ground.random(num_experts, hidden, inner)
    weights = [ExpertWeights(*pair) for pair in zip(gate_up, down, strict=True)]
    kernel = ops.prepare_experts(weights, None, ground.dtype)
    rule = RoutingRule(sizes.num_chosen, RouterScore.SOFTMAX, renormalizes=True)
    for num_rows in sizes.expert_rows:
        logits = ground.random(num_rows, num_experts, dtype=torch.float32)
        yield _route(ground, logits, rule)
        yield _experts(kernel, (gate_up, down), ground.random(num_rows, hidden), route(logits, rule))
    yield _combine(ground)


def _route(ground: Ground, logits: Tensor, rule: RoutingRule) -> Op:
    num_rows, num_experts = logits.shape
    name = f"route {num_rows} x {num_experts}"
    return Op(name, lambda: ground.ops.route(logits, rule), {"torch": lambda: route(logits, rule)})


def _experts(kernel: ExpertsKernel, stacks: tuple[Tensor, Tensor], x: Tensor, chosen: tuple[Tensor, Tensor]) -> Op:
    """`stacks` are the weights of gate and up, and of down, of all experts."""
    ids, shares = chosen
    (gate_up, down), num_experts = stacks, len(stacks[0])
    ends = torch.bincount(ids.flatten(), minlength=num_experts).cumsum(0, dtype=torch.int32)
    rows = x[ids.flatten().argsort() // ids.shape[1]]
    return Op(
        f"experts {len(x)} x {ids.shape[1]} of {num_experts}",
        lambda: kernel(x, ids, shares),
        {"torch's grouped_mm": lambda: _grouped(rows, gate_up, down, ends)},
    )


def _grouped(rows: Tensor, gate_up: Tensor, down: Tensor, ends: Tensor) -> Tensor:
    gate, up = F.grouped_mm(rows, gate_up.mT, offs=ends).chunk(2, dim=-1)
    return F.grouped_mm(F.silu(gate) * up, down.mT, offs=ends)


def _combine(ground: Ground) -> Op:
    sizes = ground.sizes
    num_tokens, num_rows = sizes.num_tokens, sizes.num_tokens * sizes.num_chosen
    outputs, shares = ground.random(num_rows, sizes.hidden), ground.random(num_rows, dtype=torch.float32)
    tokens = torch.arange(num_rows, device=ground.device) % num_tokens

    def add() -> Tensor:
        zeros = torch.zeros(num_tokens, sizes.hidden, device=ground.device)
        return zeros.index_add_(0, tokens, outputs * shares[:, None])

    return Op(
        f"combine_experts {num_rows} x {sizes.hidden}",
        lambda: ground.ops.combine_experts(outputs, tokens, shares, num_tokens=num_tokens),
        {"torch": add},
    )


def sampling_ops(ground: Ground) -> Iterator[Op]:
    """What follows the head, and what precedes the next step."""
    sizes, ops, device = ground.sizes, ground.ops, ground.device
    num_rows = sizes.num_tokens
    logits = ground.random(num_rows, sizes.vocabulary, dtype=torch.float32)
    name = f"{num_rows} x {sizes.vocabulary}"
    yield Op(f"greedy_sample {name}", lambda: ops.greedy_sample(logits), {"torch": lambda: logits.max(dim=-1)})
    rows = _draw_rows(num_rows, device)
    yield Op(
        f"sample {name}, top_k {_TOP_K}, top_p {_TOP_P}",
        lambda: ops.sample(logits, rows),
        {"torch": lambda: _draw(logits)},
    )
    ids = logits.argmax(dim=-1)

    def logprobs() -> object:
        return logits.log_softmax(dim=-1).topk(5, dim=-1)

    yield Op(f"token_logprobs {name}", lambda: ops.token_logprobs(logits, ids[:, None], 5), {"torch": logprobs})
    yield _advance(ground)


def _draw_rows(num_rows: int, device: torch.device) -> DrawRows:
    def full(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device=device)

    return DrawRows(
        temperature=full(_TEMPERATURE, torch.float32),
        top_k=full(_TOP_K, torch.int32),
        top_p=full(_TOP_P, torch.float32),
        min_p=full(0.0, torch.float32),
        seed=torch.arange(num_rows, device=device),
        choice=full(0, torch.int64),
        position=full(1000, torch.int64),
    )


def _draw(logits: Tensor) -> Tensor:
    """The same distribution without waiting for the device: of the top k, the noisiest within top p."""
    values, ids = (logits / _TEMPERATURE).topk(_TOP_K, dim=-1)
    shares = values.softmax(dim=-1)
    is_out = shares.cumsum(dim=-1) - shares >= _TOP_P
    noisy = shares.masked_fill(is_out, 0.0) / torch.empty_like(shares).exponential_()
    return ids.gather(1, noisy.argmax(dim=-1, keepdim=True))


def _advance(ground: Ground) -> Op:
    num_seqs, context = ground.sizes.decode
    num_blocks, device = -(-context // 16), ground.device
    tables = torch.arange(num_seqs * num_blocks, dtype=torch.int32, device=device).view(num_seqs, num_blocks)
    zeros = torch.zeros(num_seqs, dtype=torch.int64, device=device)
    columns = SlotColumns(zeros, zeros.clone(), tables)
    slots = torch.arange(num_seqs, device=device)
    rows = DecodeRows.padding(num_seqs, num_blocks, device)

    def advance() -> None:
        # Back to the beginning, as a position must stay within its blocks.
        columns.position.zero_()
        ground.ops.advance_batch(columns, slots, rows, block_size=16, num_blocks=num_blocks)

    def composed() -> None:
        columns.position.zero_()
        now = columns.position[slots]
        rows.token_ids.copy_(columns.last_token[slots])
        rows.positions.copy_(now)
        rows.context_lens.copy_(now + 1)
        rows.block_tables.copy_(columns.block_tables[slots])
        blocks = rows.block_tables.gather(1, now[:, None] // 16)[:, 0]
        rows.slot_mapping.copy_(blocks * 16 + now % 16)

    return Op(f"advance_batch {num_seqs}", advance, {"torch": composed})


def _packed_matrices(ground: Ground, shape: tuple[int, int]) -> dict[str, Matrix]:
    """Random ones in every format; a backend without kernels for one makes it plain."""
    group = ground.sizes.group_size
    groups = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group}
    name_to_config = {
        "int4": _compressed(groups, "pack-quantized"),
        "int8": _compressed({"num_bits": 8, "strategy": "channel"}, "int-quantized"),
        "fp8": {"quant_method": "fp8", "weight_block_size": [group, group]},
        "mxfp4": {"quant_method": "mxfp4"},
    }
    matrices: dict[str, Matrix] = {}
    for name, config in name_to_config.items():
        stored = QuantizationConfig.from_json({"quantization_config": config})
        formats = WeightFormats(frozenset(MatrixFormat))
        weights = DummyWeights(0, ground.dtype, device=ground.device, config=stored, formats=formats)
        is_stack = name == "mxfp4"
        matrices[name] = weights.stacked(name, (1, *shape[::-1]), 0) if is_stack else weights.linear(name, shape)
    return matrices


def _compressed(weights: dict[str, object], name: str) -> dict[str, object]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": groups}
