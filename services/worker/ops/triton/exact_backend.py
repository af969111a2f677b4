"""The `triton-exact` backend: a row's bits do not depend on its batch, nor on how its context was computed.

It has the kernels of `triton`, launched so that a row is always computed in the same way:

    products        our own for plain weights too, with tiles of one size, so one matrix instruction and one order, and
                    no splits; rows that are quantised to FP8 have scales of their own
    attention       decodes and chunks take one kernel; tiles of the context are counted from its first token, and no
                    context is split
    experts         tiles of one size, sums by rising expert

Norms, rotations, routing and writes to the cache have a program for each row anyway. That a row's place in a tile of a
matrix instruction does not change its bits is a property of the hardware.

Source: He et al., "Defeating Nondeterminism in LLM Inference", Thinking Machines Lab, 2025.
"""

from __future__ import annotations

import torch

from services.worker.ops import composed
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.ops.triton import activation, norm, prepare, recurrent, routing, state
from services.worker.ops.triton import advance_batch as batch
from services.worker.ops.triton import rope as rotary
from services.worker.ops.triton.attention import exact_plan, plan
from services.worker.ops.triton.products import expert_sums, per_head
from services.worker.ops.triton.sampling import edits, greedy
from services.worker.ops.triton.sampling import sample as sampling
from services.worker.ops.triton.sampling import token_logprobs as logprobs


class TritonExactOps(state.TritonState):
    """The function that computes each op; see `Ops`."""

    name = "triton-exact"
    is_exact = True
    draws_on_host = False
    automatic_dtype = torch.bfloat16
    formats = frozenset(MatrixFormat)
    automatic_quantization: MatrixFormat | None = None
    kv_dtypes: tuple[torch.dtype, ...] = (torch.float8_e4m3fn,)

    numerics = state.numerics
    num_threads = property(composed.num_threads)
    use_threads = staticmethod(composed.use_threads)
    quantize_activations = state.quantize_activations
    make_capture = staticmethod(composed.capture_graphs)

    advance_batch = staticmethod(batch.advance_batch)

    prepare_linear = prepare.prepare_exact_linear
    prepare_per_head_linear = per_head.ExactPerHeadLinear
    prepare_embedding = staticmethod(prepare.prepare_embedding)
    prepare_head = composed.prepare_head
    prepare_tied = prepare.prepare_tied

    rms_norm = staticmethod(norm.rms_norm)
    add_rms_norm = staticmethod(norm.add_rms_norm)
    layer_norm = staticmethod(norm.layer_norm)
    act_and_mul = staticmethod(activation.act_and_mul)
    scale = staticmethod(composed.scale)
    mul_sigmoid = staticmethod(recurrent.mul_sigmoid)

    prepare_rope = staticmethod(rotary.prepare_rope)
    select_rope = staticmethod(rotary.select_rope)
    rope = staticmethod(rotary.rope)

    check_block_size = staticmethod(composed.check_block_size)
    check_attention = staticmethod(composed.check_attention)
    check_latent_attention = staticmethod(composed.check_latent_attention)
    plan_attention = staticmethod(exact_plan.plan_attention)
    write_kv = staticmethod(plan.write_kv)
    norm_rope_write = staticmethod(plan.norm_rope_write)
    write_cache = staticmethod(plan.write_cache)
    prefill_attention = composed.prefill_attention
    decode_attention = staticmethod(exact_plan.decode_attention)
    mla_attention = staticmethod(exact_plan.mla_attention)
    select_context = staticmethod(exact_plan.select_context)

    causal_conv = staticmethod(recurrent.exact_causal_conv)
    gated_delta_rule = staticmethod(recurrent.exact_delta_rule)
    gated_rms_norm = staticmethod(recurrent.gated_rms_norm)

    route = staticmethod(routing.route)
    prepare_experts = prepare.prepare_exact_experts
    combine_experts = staticmethod(expert_sums.combine_experts)

    edit_logits = staticmethod(edits.edit_logits)
    sample = staticmethod(sampling.sample)
    token_logprobs = staticmethod(logprobs.token_logprobs)
    greedy_sample = staticmethod(greedy.greedy_sample)


def load_exact_ops() -> TritonExactOps:
    """Create the backend.

    Raises:
        DeviceError: as from `state.check_triton`.
    """
    state.check_triton(TritonExactOps.name)
    return TritonExactOps()
