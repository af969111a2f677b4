"""The `native` backend: what its own kernels compute, and the `cpu` backend's torch kernels for the rest."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from services.worker.device import DeviceError
from services.worker.forward.capture import Capture
from services.worker.forward.kv_cache import LayerCache
from services.worker.ops import composed, routing
from services.worker.ops.cpu import batch, mla
from services.worker.ops.cpu import experts as cpu_experts
from services.worker.ops.cpu.backend import CpuOps
from services.worker.ops.cpu.backend import numerics as cpu_numerics
from services.worker.ops.matrix_rows import MatrixFormat
from services.worker.ops.native import attention, elementwise, experts, heads, products, recurrent
from services.worker.ops.native import draw as drawing
from services.worker.ops.native.build import BuildError
from services.worker.ops.native.capture import NativeCapture
from services.worker.ops.native.formats import FORMATS
from services.worker.ops.native.isa import Isa, available_isas
from services.worker.ops.native.library import load_library
from services.worker.ops.native.state import NativeState
from services.worker.ops.protocol import Ops

logger = logging.getLogger(__name__)


class NativeOps(NativeState):
    """The function that computes each op; see `Ops`. A row's bits depend on its batch."""

    name = "native"
    is_exact = False
    formats = frozenset({MatrixFormat.INT8, MatrixFormat.INT4, MatrixFormat.MXFP4, MatrixFormat.GGUF})
    automatic_quantization: MatrixFormat | None = MatrixFormat.INT8
    dtypes = composed.FLOAT_DTYPES
    kv_dtypes = tuple(FORMATS)
    draws_on_host = True

    def __init__(self, isa: Isa) -> None:
        """Raise `BuildError` if the kernels for `isa` cannot be built."""
        super().__init__(load_library(isa), isa.value)
        # Perplexity rises by 0.1 % with bfloat16, whether weights are quantised or not.
        self.automatic_dtype = torch.bfloat16 if isa.has_bf16 else torch.float32

    def numerics(self) -> str:
        return f"native torch-{torch.__version__} {self.kernels} pool-{self.num_threads} {cpu_numerics()}"

    @property
    def num_threads(self) -> int:
        return int(self.library.ls_num_threads())

    def use_threads(self, count: int) -> None:
        """See `Ops.use_threads`. One pool: torch's kernels, which are small here, run on the caller's thread."""
        self.library.ls_set_num_threads(count)
        torch.set_num_threads(1)

    def make_capture(self, device: torch.device, layers: Sequence[LayerCache]) -> Capture:
        return NativeCapture(self.library, self.results)

    quantize_activations = composed.refuse_quantized_activations

    advance_batch = staticmethod(batch.advance_batch)
    place_runs = staticmethod(batch.place_runs)

    prepare_linear = products.prepare_linear
    prepare_per_head_linear = staticmethod(composed.prepare_per_head_linear)
    prepare_embedding = products.prepare_embedding
    prepare_head = products.prepare_head
    prepare_tied = products.prepare_tied

    rms_norm = elementwise.rms_norm
    add_rms_norm = elementwise.add_rms_norm
    layer_norm = elementwise.layer_norm
    act_and_mul = elementwise.act_and_mul
    scale = elementwise.scale
    mul_sigmoid = recurrent.mul_sigmoid

    prepare_rope = staticmethod(heads.prepare_rope)
    select_rope = staticmethod(heads.select_rope)
    rope = heads.rope

    check_block_size = staticmethod(composed.check_block_size)
    plan_attention = attention.plan_attention
    write_kv = heads.write_kv
    norm_rope_write = heads.norm_rope_write
    write_cache = heads.write_cache
    prefill_attention = composed.prefill_attention
    decode_attention = attention.decode_attention
    mla_attention = attention.mla_attention
    select_context = mla.select_context

    causal_conv = recurrent.causal_conv
    gated_delta_rule = recurrent.gated_delta_rule
    gated_rms_norm = recurrent.gated_rms_norm

    route = staticmethod(routing.route)
    prepare_experts = experts.prepare_experts
    combine_experts = staticmethod(cpu_experts.combine_experts)

    edit_logits = staticmethod(composed.edit_logits)
    sample = composed.sample
    draw = drawing.draw
    accept = staticmethod(batch.accept)
    token_logprobs = staticmethod(composed.token_logprobs)
    greedy_sample = elementwise.greedy_sample


def load_native_ops(isa_name: str) -> Ops:
    """The backend for an `Isa`, or with `auto` for the best that can be built; `cpu` if none can, with a warning.

    Raises:
        DeviceError: the processor does not have the instructions that `isa_name` asks for.
    """
    isas = available_isas()
    if isa_name != "auto":
        isas = [isa for isa in isas if isa.value == isa_name]
        if not isas:
            raise DeviceError(f"--native-isa {isa_name}: this processor does not have these instructions")
    message = ""
    if not isas:
        logger.warning("no kernels for this processor: the cpu backend takes over")
        return CpuOps()
    # An old compiler may not know the last.
    for isa in reversed(isas):
        try:
            ops = NativeOps(isa)
        except BuildError as error:
            message = str(error)
            continue
        if isa is not isas[-1]:
            names = isas[-1].value, isa.value
            logger.warning("the kernels for %s cannot be built: those for %s take over", *names)
        return ops
    logger.warning("the kernels cannot be built: the cpu backend takes over", extra={"error": message})
    return CpuOps()
