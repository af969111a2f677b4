"""A model of transformers' class in the place of one of ours."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from services.worker.forward.forward_context import get_forward_context
from services.worker.forward.kv_cache import KvCacheSpec, LayerCache, attention_cache
from services.worker.forward.state_cache import NO_STATES
from services.worker.layers.shard import Shard
from services.worker.models.generic.attention import Attend, AttentionRequest, attending
from services.worker.models.generic.build import Skeleton, step_arguments
from services.worker.models.generic.dry_run import PlannedCall
from services.worker.models.generic.rotary import Rotations
from services.worker.models.protocol import CausalLM, MtpLayers
from services.worker.ops import AttentionParams, Ops


class GenericModel(CausalLM):
    """Runs transformers' code on the tokens of a step, as one sequence [1, T]; see `CausalLM`."""

    implementation = "transformers"
    code = ""
    """Set by what loads it."""
    mtp: MtpLayers | None = None
    state_spec = NO_STATES

    def __init__(
        self, skeleton: Skeleton, shard: Shard, *, context_length: int, has_long_factors: bool, kv_scales: Tensor | None
    ) -> None:
        """Run `skeleton`, whose weights have been read.

        Args:
            skeleton: The model.
            shard: What it was read with.
            context_length: The context served.
            has_long_factors: See `CausalLM`.
            kv_scales: [1] float32 where the cache is in float8_e4m3fn: the scale of keys and of values; else None.
        """
        calls = skeleton.calls
        self.dtype = shard.weights.dtype
        self.context_length = context_length
        self.has_long_factors = has_long_factors
        self.logits_width: int = skeleton.causal.config.get_text_config().vocab_size
        self.kv_cache_spec = KvCacheSpec(tuple(_cache_of(call, shard.kv_dtype) for call in calls))
        self._causal: PreTrainedModel = skeleton.causal
        self._base: PreTrainedModel = skeleton.base
        self._rotations = Rotations(shard.ops)
        scales = () if kv_scales is None else (kv_scales, kv_scales)
        self._calls = [_Call(shard.ops, number, call, shard.tp.rank, scales) for number, call in enumerate(calls)]

    @override
    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        answers = _Answers(self._calls)
        with attending(answers), self._rotations.of_step() if token_ids.device.type == "cpu" else nullcontext():
            hidden: Tensor = self._base(**step_arguments(token_ids, positions)).last_hidden_state
        assert answers.num_answered == len(self._calls), "a forward pass has the calls of the dry run"
        return hidden[0]

    @override
    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._causal(inputs_embeds=hidden[None], use_cache=False).logits
        return logits[0].float()


def _cache_of(call: PlannedCall, dtype: torch.dtype) -> LayerCache:
    return attention_cache(call.num_kv_heads, call.key_dim, dtype)


class _Call:
    """One call of attention in every forward pass, with a layer of the cache of its own."""

    def __init__(self, ops: Ops, number: int, call: PlannedCall, tp_rank: int, scales: tuple[Tensor, ...]) -> None:
        self._ops = ops
        self._number = number
        self._call = call
        self._tp_rank = tp_rank
        self._scales = scales
        self._params = AttentionParams(call.scale, call.window)
        self._has_sinks = False

    def __call__(self, request: AttentionRequest) -> Tensor:
        context, call = get_forward_context(), self._call
        query, key, value = (_rows(each) for each in (request.query, request.key, request.value))
        if call.value_dim < call.key_dim:
            value = F.pad(value, (0, call.key_dim - call.value_dim))
        sinks = request.options.get("s_aux")
        if sinks is not None and not self._has_sinks:
            self._params, self._has_sinks = AttentionParams(call.scale, call.window, self._part_of(sinks)), True
        cache = context.kv_cache.layers[self._number] + self._scales
        self._ops.write_kv(key, value, cache, context.plan)
        if context.plan.metadata.is_prefill:
            attended = self._ops.prefill_attention(query, key, value, cache, context.plan, self._params)
        else:
            attended = self._ops.decode_attention(query, cache, context.plan, self._params)
        context.progress.num_layers += 1
        return attended.view(1, query.shape[0], call.num_heads, -1)[..., : call.value_dim]

    def _part_of(self, sinks: Tensor) -> Tensor:
        """The sinks of this rank's heads, float32."""
        flat, num_heads = sinks.detach().flatten().float(), self._call.num_heads
        start = self._tp_rank * num_heads if len(flat) > num_heads else 0
        return flat[start : start + num_heads].contiguous()


class _Answers(Attend):
    """Answers the calls of one forward pass."""

    def __init__(self, calls: Sequence[_Call]) -> None:
        self._calls = calls
        self.num_answered = 0

    @override
    def __call__(self, request: AttentionRequest) -> Tensor:
        call = self._calls[self.num_answered]
        self.num_answered += 1
        return call(request)


def _rows(heads: Tensor) -> Tensor:
    """[1, H, T, D] as [T, H, D], contiguous."""
    return heads[0].transpose(0, 1).contiguous()
