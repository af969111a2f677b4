"""Launches of products with packed weights, and of experts, with the shapes of published models, only to compile."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.worker.ops import ExpertGroups, ExpertWeights, RouterScore, RoutingRule, SwigluClamp
from services.worker.ops.matrices import Fp8Matrix, IntMatrix, Mxfp4Matrix
from services.worker.ops.triton.products.expert_sums import combine_experts
from services.worker.ops.triton.products.experts import TritonExperts
from services.worker.ops.triton.products.fp8_rows import Fp8Encoding
from services.worker.ops.triton.products.linear import PackedEmbedding, PackedLinear
from services.worker.ops.triton.routing import route

BF16 = torch.bfloat16
# The sizes of Qwen3-8B.
HIDDEN, INNER, VOCABULARY = 4096, 12288, 151_936
# The outputs of its keys' projection, and DeepSeek-V2-Lite's inner numbers, of which the last group is not whole.
NARROW, TAILED = 1024, 10944

# Qwen3-30B-A3B, gpt-oss-20b and DeepSeek-V3.
ROUTING = (
    (128, RoutingRule(8, RouterScore.SOFTMAX, renormalizes=True)),
    (32, RoutingRule(4, RouterScore.LOGIT)),
    (
        256,
        RoutingRule(
            8,
            RouterScore.SIGMOID,
            torch.empty(256, device="meta"),
            ExpertGroups(num_groups=8, num_chosen=4, num_scoring=2),
            renormalizes=True,
            scale=2.5,
        ),
    ),
)


@dataclass(frozen=True)
class Mixture:
    """The sizes of a published mixture of experts, and one expert."""

    num_experts: int
    num_chosen: int
    weights: ExpertWeights
    clamp: SwigluClamp | None = None

    def launch(self, num_tokens: int, *, offset: int = 0, encoding: Fp8Encoding | None = None) -> None:
        """A step of `num_tokens`; their experts begin at `offset` in longer columns."""
        kernel = TritonExperts([self.weights] * self.num_experts, self.clamp, BF16, encoding=encoding)
        expert_ids = on_meta(torch.int32, num_tokens + offset, self.num_chosen)[offset:]
        expert_weights = on_meta(torch.float32, num_tokens + offset, self.num_chosen)[offset:]
        kernel(on_meta(BF16, num_tokens, self.weights.down.shape[0]), expert_ids, expert_weights)


def mixtures() -> tuple[Mixture, ...]:
    """Qwen3-30B-A3B plain and in int4, gpt-oss-20b, and DeepSeek-V3 in FP8."""
    gpt_oss = ExpertWeights(mxfp4(5760, 2880), mxfp4(2880, 2880), on_meta(BF16, 5760), on_meta(BF16, 2880))
    qwen3 = int4(1536, 2048, group_size=128), int4(2048, 768, group_size=128)
    return (
        Mixture(128, 8, ExpertWeights(on_meta(BF16, 1536, 2048), on_meta(BF16, 2048, 768))),
        Mixture(128, 8, ExpertWeights(*qwen3)),
        Mixture(32, 4, gpt_oss, SwigluClamp(1.702, 7.0)),
        Mixture(256, 8, ExpertWeights(fp8(4096, 7168), fp8(7168, 2048))),
    )


def launch_experts(num_tokens: int, *, offset: int = 0) -> None:
    """A step's experts and their choice, and sums of rows from other ranks."""
    for mixture in mixtures():
        mixture.launch(num_tokens, offset=offset)
    for num_experts, rule in ROUTING:
        route(on_meta(torch.float32, num_tokens, num_experts), rule)
    tokens, weights = (on_meta(dtype, num_tokens + offset)[offset:] for dtype in (torch.int64, torch.float32))
    combine_experts(on_meta(BF16, num_tokens, 2048), tokens, weights, num_tokens=num_tokens)


def launch_products(num_tokens: int, *, offset: int = 0) -> None:
    """A step's products with weights in every format, and embeddings; token ids begin at `offset` in longer ones."""
    token_ids = on_meta(torch.int64, offset + num_tokens)[offset:]
    for weight in (
        int8(2 * INNER, HIDDEN),
        int4(2 * INNER, HIDDEN, group_size=128),
        # As GGUF's Q4_1.
        int4(2 * INNER, HIDDEN, group_size=32, has_offsets=True),
        mxfp4(2 * INNER, HIDDEN),
        fp8(2 * INNER, HIDDEN),
    ):
        PackedLinear(weight, None, BF16)(on_meta(BF16, num_tokens, HIDDEN))
        PackedLinear(weight, None, torch.float32)(on_meta(torch.float32, num_tokens, HIDDEN))
    PackedLinear(int8(HIDDEN, HIDDEN), on_meta(BF16, HIDDEN), BF16)(on_meta(BF16, num_tokens, HIDDEN))
    # With so few outputs, sums are split.
    PackedLinear(int4(NARROW, HIDDEN, group_size=128), None, BF16)(on_meta(BF16, num_tokens, HIDDEN))
    PackedEmbedding(int8(VOCABULARY, HIDDEN), BF16)(token_ids)


def launch_fp8_products(num_tokens: int, encoding: Fp8Encoding) -> None:
    """A step's products with FP8 matrices, of rows in FP8."""
    x, inner, tailed = on_meta(BF16, num_tokens, HIDDEN), on_meta(BF16, num_tokens, TAILED), fp8(HIDDEN, TAILED)
    for weight in (fp8(2 * INNER, HIDDEN), fp8(NARROW, HIDDEN, group_size=HIDDEN)):
        PackedLinear(weight, None, BF16, encoding=encoding)(x)
    for is_exact in (False, True):
        PackedLinear(tailed, None, BF16, encoding=encoding, is_exact=is_exact)(inner)


def launch_fp8_experts(num_tokens: int, encoding: Fp8Encoding, *, offset: int = 0) -> None:
    """A step's experts of which weights and rows are in FP8: DeepSeek-V3's."""
    mixtures()[-1].launch(num_tokens, offset=offset, encoding=encoding)


def int8(num_rows: int, num_columns: int) -> IntMatrix:
    """With a scale per row."""
    codes = on_meta(torch.int8, num_rows, num_columns)
    return IntMatrix(8, codes, on_meta(torch.float32, num_rows, 1), num_columns)


def int4(num_rows: int, num_columns: int, *, group_size: int, has_offsets: bool = False) -> IntMatrix:
    """With a scale per group of columns."""
    scales = on_meta(torch.float32, num_rows, num_columns // group_size)
    codes = on_meta(torch.uint8, num_rows, num_columns // 2)
    return IntMatrix(4, codes, scales, group_size, scales if has_offsets else None)


def mxfp4(num_rows: int, num_columns: int) -> Mxfp4Matrix:
    """As gpt-oss's experts."""
    codes = on_meta(torch.uint8, num_rows, num_columns // 2)
    return Mxfp4Matrix(codes, on_meta(torch.uint8, num_rows, num_columns // 32))


def fp8(num_rows: int, num_columns: int, *, group_size: int = 128) -> Fp8Matrix:
    """By default as DeepSeek-V3's: a scale per block, which every row of the block has."""
    codes, num_groups = on_meta(torch.uint8, num_rows, num_columns), -(-num_columns // group_size)
    return Fp8Matrix(codes, on_meta(torch.float32, num_rows, num_groups), group_size)


def on_meta(dtype: torch.dtype, *shape: int) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")
