"""The `reference` backend: exact, because it computes every row alone and in a fixed order.

A row's inputs always have the same shape: one row of activations, or one context copied into fresh memory. So kernels
take the same path. All weights are read for every row: only for tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.worker.forward.kv_cache import LayerCache
from services.worker.ops import composed
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.ops.reference import attention, elementwise, experts, linear, recurrent, rotary


class ReferenceOps:
    """The function that computes each op; see `Ops`."""

    name = "reference"
    is_exact = True
    instructions = torch.backends.cpu.get_cpu_capability().lower()
    automatic_dtype = torch.float32
    dtypes: tuple[torch.dtype, ...] = composed.FLOAT_DTYPES
    formats: frozenset[MatrixFormat] = frozenset()
    automatic_quantization: MatrixFormat | None = None
    kv_dtypes: tuple[torch.dtype, ...] = (torch.float8_e4m3fn,)
    draws_on_host = True
    packing = None

    def numerics(self) -> str:
        capability = torch.backends.cpu.get_cpu_capability()
        return f"reference torch-{torch.__version__} {capability} threads-{torch.get_num_threads()}"

    def make_capture(self, device: torch.device, layers: Sequence[LayerCache]) -> None:
        """See `Ops.make_capture`: its attention reads each step's lengths on the host, and its draws wait."""

    num_threads = property(composed.num_threads)
    use_threads = staticmethod(composed.use_threads)
    quantize_activations = composed.refuse_quantized_activations

    advance_batch = staticmethod(composed.advance_batch)
    place_runs = staticmethod(composed.place_runs)

    prepare_linear = staticmethod(linear.prepare_linear)
    prepare_per_head_linear = staticmethod(linear.prepare_per_head_linear)
    prepare_embedding = staticmethod(composed.prepare_embedding)
    prepare_head = composed.prepare_head
    prepare_tied = composed.prepare_tied

    rms_norm = staticmethod(elementwise.rms_norm)
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
    prefill_attention = composed.prefill_attention
    decode_attention = staticmethod(attention.decode_attention)
    mla_attention = staticmethod(attention.mla_attention)
    select_context = staticmethod(attention.select_context)

    causal_conv = staticmethod(recurrent.causal_conv)
    gated_delta_rule = staticmethod(recurrent.gated_delta_rule)
    gated_rms_norm = staticmethod(recurrent.gated_rms_norm)

    route = staticmethod(experts.route)
    prepare_experts = experts.prepare_experts
    combine_experts = staticmethod(experts.combine_experts)

    edit_logits = staticmethod(composed.edit_logits)
    sample = composed.sample
    draw = staticmethod(composed.draw)
    accept = staticmethod(composed.accept)
    token_logprobs = staticmethod(composed.token_logprobs)
    greedy_sample = staticmethod(composed.greedy_sample)
