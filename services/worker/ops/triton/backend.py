"""The `triton` backend: models on a GPU, with our own kernels and torch's products with matrices that are not packed.

No op waits for the device, and launches depend only on shapes and on numbers on the host, so a graph can hold a step.
A row's bits depend on the batch it is in.
"""

from __future__ import annotations

import torch

from services.worker.ops import composed
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.ops.triton import activation, norm, prepare, recurrent, routing, run_places, state
from services.worker.ops.triton import advance_batch as batch
from services.worker.ops.triton import rope as rotary
from services.worker.ops.triton.attention import plan
from services.worker.ops.triton.products import expert_sums
from services.worker.ops.triton.sampling import edits, greedy
from services.worker.ops.triton.sampling import sample as sampling
from services.worker.ops.triton.sampling import token_logprobs as logprobs


class TritonOps(state.TritonState):
    """The function that computes each op; see `Ops`."""

    name = "triton"
    is_exact = False
    draws_on_host = False
    packing = None
    automatic_dtype = torch.bfloat16
    dtypes: tuple[torch.dtype, ...] = composed.FLOAT_DTYPES
    formats = frozenset(MatrixFormat)
    automatic_quantization: MatrixFormat | None = None
    kv_dtypes: tuple[torch.dtype, ...] = (torch.float8_e4m3fn,)

    numerics = state.numerics
    num_threads = property(composed.num_threads)
    use_threads = staticmethod(composed.use_threads)
    quantize_activations = state.quantize_activations
    make_capture = staticmethod(composed.capture_graphs)

    advance_batch = staticmethod(batch.advance_batch)
    place_runs = staticmethod(run_places.place_runs)

    prepare_linear = prepare.prepare_linear
    prepare_per_head_linear = staticmethod(composed.prepare_per_head_linear)
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
    plan_attention = staticmethod(plan.plan_attention)
    write_kv = staticmethod(plan.write_kv)
    norm_rope_write = staticmethod(plan.norm_rope_write)
    write_cache = staticmethod(plan.write_cache)
    prefill_attention = composed.prefill_attention
    decode_attention = staticmethod(plan.decode_attention)
    mla_attention = staticmethod(plan.mla_attention)
    select_context = staticmethod(plan.select_context)

    causal_conv = staticmethod(recurrent.causal_conv)
    gated_delta_rule = staticmethod(recurrent.gated_delta_rule)
    gated_rms_norm = staticmethod(recurrent.gated_rms_norm)

    route = staticmethod(routing.route)
    prepare_experts = prepare.prepare_experts
    combine_experts = staticmethod(expert_sums.combine_experts)

    edit_logits = staticmethod(edits.edit_logits)
    sample = staticmethod(sampling.sample)
    accept = staticmethod(composed.accept)
    token_logprobs = staticmethod(logprobs.token_logprobs)
    greedy_sample = staticmethod(greedy.greedy_sample)


def load_triton_ops() -> TritonOps:
    """Create the backend. Without a GPU, kernels run only in Triton's interpreter.

    Raises:
        DeviceError: as from `state.check_triton`.
    """
    state.check_triton(TritonOps.name)
    return TritonOps()
