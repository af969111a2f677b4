"""The `aiter` backend: AITER's kernels on an AMD GPU, and our Triton kernels where AITER's compute something else.

No op waits for the device, except that AITER may build or load a kernel at its first call. A row's bits depend on the
batch it is in.
"""

from __future__ import annotations

from importlib import metadata as packages

import torch
import triton

from services.worker.ops import composed
from services.worker.ops.aiter_ops import attention, elementwise, experts, linear
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.ops.triton import advance_batch as batch
from services.worker.ops.triton import norm, prepare, recurrent, routing, run_places
from services.worker.ops.triton import rope as rotary
from services.worker.ops.triton.attention import plan as triton_attention
from services.worker.ops.triton.products import expert_sums
from services.worker.ops.triton.sampling import edits, greedy
from services.worker.ops.triton.sampling import sample as sampling
from services.worker.ops.triton.sampling import token_logprobs as logprobs
from services.worker.ops.triton.state import TritonState


class AiterOps(TritonState):
    """The function that computes each op; see `Ops`."""

    name = "aiter"
    is_exact = False
    draws_on_host = False
    packing = None
    automatic_dtype = torch.bfloat16
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    formats = frozenset(MatrixFormat)
    automatic_quantization: MatrixFormat | None = None
    # AITER's own FP8 is the GPU's: on MI300 a code would be half the number that it is on MI350.
    kv_dtypes: tuple[torch.dtype, ...] = ()

    def numerics(self) -> str:
        return numerics(self.instructions)

    num_threads = property(composed.num_threads)
    use_threads = staticmethod(composed.use_threads)
    # Its experts have no FP8 weights.
    quantize_activations = composed.refuse_quantized_activations
    make_capture = staticmethod(composed.capture_graphs)

    advance_batch = staticmethod(batch.advance_batch)
    place_runs = staticmethod(run_places.place_runs)

    prepare_linear = linear.prepare_linear
    prepare_per_head_linear = staticmethod(composed.prepare_per_head_linear)
    prepare_embedding = staticmethod(prepare.prepare_embedding)
    prepare_head = composed.prepare_head
    prepare_tied = prepare.prepare_tied

    rms_norm = staticmethod(elementwise.rms_norm)
    add_rms_norm = staticmethod(elementwise.add_rms_norm)
    layer_norm = staticmethod(norm.layer_norm)
    act_and_mul = staticmethod(elementwise.act_and_mul)
    scale = staticmethod(composed.scale)
    mul_sigmoid = staticmethod(recurrent.mul_sigmoid)

    prepare_rope = staticmethod(elementwise.prepare_rope)
    select_rope = staticmethod(rotary.select_rope)
    rope = staticmethod(elementwise.rope)

    check_block_size = staticmethod(attention.check_block_size)
    plan_attention = staticmethod(attention.plan_attention)
    write_kv = staticmethod(attention.write_kv)
    norm_rope_write = attention.norm_rope_write
    write_cache = staticmethod(triton_attention.write_cache)
    prefill_attention = composed.prefill_attention
    decode_attention = staticmethod(attention.decode_attention)
    mla_attention = staticmethod(triton_attention.mla_attention)
    select_context = staticmethod(triton_attention.select_context)

    causal_conv = staticmethod(recurrent.causal_conv)
    gated_delta_rule = staticmethod(recurrent.gated_delta_rule)
    gated_rms_norm = staticmethod(recurrent.gated_rms_norm)

    # AITER's kernels choose any of equal scores.
    route = staticmethod(routing.route)
    prepare_experts = experts.prepare_experts
    combine_experts = staticmethod(expert_sums.combine_experts)

    edit_logits = staticmethod(edits.edit_logits)
    sample = staticmethod(sampling.sample)
    accept = staticmethod(composed.accept)
    token_logprobs = staticmethod(logprobs.token_logprobs)
    greedy_sample = staticmethod(greedy.greedy_sample)


def numerics(instructions: str) -> str:
    """Versions, and the device."""
    return f"aiter aiter-{_version()} torch-{torch.__version__} triton-{triton.__version__} {instructions}"


def _version() -> str:
    """AITER's, or "unpacked" where it is not installed."""
    try:
        return packages.version("amd-aiter")
    except packages.PackageNotFoundError:
        return "unpacked"
