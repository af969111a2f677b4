"""What every backend's recurrent layers compute: a causal convolution and the gated delta rule, over states by slot.

Shapes: T tokens of the step, C channels, K key heads, V value heads, a multiple of K; D head dim of keys, E of values.
Value head v has the keys and queries of head v // (V / K).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from services.worker.forward.forward_context import AttentionMetadata
from services.worker.ops.arguments import DeltaGates


class RecurrentOps(Protocol):
    """The recurrent layers of one backend; see `Ops`.

    A sequence's tokens of a step continue from the state in its row of `state_slots`, and leave there the state after
    them. Rows of other sequences are neither read nor written. On an exact backend bits depend neither on the batch nor
    on how a sequence is divided into steps: it computes token by token.
    """

    def causal_conv(self, x: Tensor, weight: Tensor, state: Tensor, metadata: AttentionMetadata) -> Tensor:
        """`silu(sum over j of weight[j] * x[t - k + 1 + j])` of each channel, as a new [T, C]; computed in float32.

        Args:
            x: [T, C]; rows may have any stride. Not written.
            weight: [k, C], the same dtype, k at least 2.
            state: [num_slots, k - 1, C], the same dtype: the values of `x` for a sequence's last tokens, 0 before its
                first. Written in place.

        Source: arXiv:2312.00752, section 3.4 (Mamba), whose convolution this is.
        """

    def gated_delta_rule(
        self, qkv: Tensor, gates: Tensor, params: DeltaGates, state: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """Read and write each value head's memory, token by token; computed in float32.

            query, key    divided by their length, sqrt(sum of squares + 1e-6); the query also by sqrt(D)
            beta          sigmoid(b)
            g             params.decay * softplus(a + params.bias)
            S             exp(g) * S, and then S + key (beta * (value - Sᵀ key))ᵀ
            result        Sᵀ query

        Args:
            qkv: [T, 2 K D + V E]: queries, keys and values side by side; contiguous. Not written.
            gates: [T, 2 V]: b, then a; rows may have any stride. Not written.
            state: [num_slots, V, D, E] float32: S. Written in place.

        Returns:
            A new [T, V, E] of the dtype of `qkv`.

        Source: arXiv:2412.06464, equation 10 (Gated DeltaNet).
        """

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`rms_norm(x, weight, eps) * silu(gate)`, as a new tensor of x's shape; computed in float32.

        Args:
            x: [T, V, E]; contiguous. Not written.
            gate: [T, V, E], the same dtype; tokens may have any stride. Not written.
            weight: [E], the same dtype.

        Source: arXiv:2412.06464, figure 1; transformers 5, `Qwen3NextRMSNormGated`.
        """
