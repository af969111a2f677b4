"""The `cpu` backend: batched torch kernels, one call per layer for all rows.

Eager calls have overhead, so they are few and large. oneDNN packs weights once at load, which halves the time of a
float32 decode step. A row's bits depend on its batch.
"""

from __future__ import annotations

import torch

from services.worker.ops import composed, recurrent, routing
from services.worker.ops.cpu import attention, batch, elementwise, experts, linear, mla, rotary
from services.worker.ops.matrix_rows import MatrixFormat


class CpuOps(attention.GatherBuffers):
    """The function that computes each op; see `Ops`."""

    name = "cpu"
    is_exact = False
    instructions = torch.backends.cpu.get_cpu_capability().lower()
    automatic_dtype = torch.float32
    dtypes: tuple[torch.dtype, ...] = composed.FLOAT_DTYPES
    formats: frozenset[MatrixFormat] = frozenset()
    automatic_quantization: MatrixFormat | None = None
    kv_dtypes: tuple[torch.dtype, ...] = ()
    draws_on_host = True
    packing = None

    def numerics(self) -> str:
        return numerics()

    num_threads = property(composed.num_threads)
    use_threads = staticmethod(composed.use_threads)
    quantize_activations = composed.refuse_quantized_activations
    make_capture = staticmethod(composed.capture_graphs)

    advance_batch = staticmethod(batch.advance_batch)
    place_runs = staticmethod(batch.place_runs)

    prepare_linear = staticmethod(linear.prepare_linear)
    prepare_per_head_linear = staticmethod(composed.prepare_per_head_linear)
    prepare_embedding = staticmethod(composed.prepare_embedding)
    prepare_head = composed.prepare_head
    prepare_tied = composed.prepare_tied

    rms_norm = staticmethod(composed.rms_norm)
    add_rms_norm = staticmethod(elementwise.add_rms_norm)
    layer_norm = staticmethod(elementwise.layer_norm)
    act_and_mul = staticmethod(elementwise.act_and_mul)
    scale = staticmethod(composed.scale)
    mul_sigmoid = staticmethod(recurrent.mul_sigmoid)

    prepare_rope = staticmethod(rotary.prepare_rope)
    select_rope = staticmethod(rotary.select_rope)
    rope = staticmethod(rotary.rope)

    check_block_size = staticmethod(composed.check_block_size)
    plan_attention = staticmethod(attention.plan_attention)
    write_kv = staticmethod(attention.write_kv)
    norm_rope_write = composed.norm_rope_write
    write_cache = staticmethod(attention.write_cache)
    prefill_attention = attention.prefill_attention
    decode_attention = attention.decode_attention
    mla_attention = mla.mla_attention
    select_context = mla.select_context

    causal_conv = staticmethod(recurrent.causal_conv)
    gated_delta_rule = staticmethod(recurrent.gated_delta_rule)
    gated_rms_norm = staticmethod(recurrent.gated_rms_norm)

    route = staticmethod(routing.route)
    prepare_experts = experts.prepare_experts
    combine_experts = staticmethod(experts.combine_experts)

    edit_logits = staticmethod(composed.edit_logits)
    sample = composed.sample
    draw = staticmethod(composed.draw)
    accept = staticmethod(batch.accept)
    token_logprobs = staticmethod(composed.token_logprobs)
    greedy_sample = staticmethod(composed.greedy_sample)


def numerics() -> str:
    """All that the results of these kernels depend on, `cpu` first."""
    capability = torch.backends.cpu.get_cpu_capability()
    return f"cpu torch-{torch.__version__} {linear.packing()} {capability} threads-{torch.get_num_threads()}"
