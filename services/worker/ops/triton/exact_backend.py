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

from services.worker.ops.triton import prepare, recurrent, state
from services.worker.ops.triton.attention import exact_plan
from services.worker.ops.triton.backend import TritonOps
from services.worker.ops.triton.products import per_head


class TritonExactOps(TritonOps):
    """The functions that compute an op otherwise than in `triton`; see `Ops`."""

    name = "triton-exact"
    is_exact = True

    prepare_linear = prepare.prepare_exact_linear
    prepare_per_head_linear = per_head.ExactPerHeadLinear

    plan_attention = staticmethod(exact_plan.plan_attention)
    decode_attention = staticmethod(exact_plan.decode_attention)
    mla_attention = staticmethod(exact_plan.mla_attention)
    select_context = staticmethod(exact_plan.select_context)

    causal_conv = staticmethod(recurrent.exact_causal_conv)
    gated_delta_rule = staticmethod(recurrent.exact_delta_rule)

    prepare_experts = prepare.prepare_exact_experts


def load_exact_ops() -> TritonExactOps:
    """Create the backend.

    Raises:
        DeviceError: as from `state.check_triton`.
    """
    state.check_triton(TritonExactOps.name)
    return TritonExactOps()
