"""Draft models for a tiny model, their expected drafts computed from scratch, and test requests.

The answers to the requests must not depend on drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from services.worker.batch.decodes import DeviceDrafts, Drafts
from services.worker.batch.enter_checks import BatchLimits
from services.worker.batch.step_input import StepInput
from services.worker.drafts.drafter import DraftProposer, DraftRows, Observe
from services.worker.drafts.ngram_drafts import LookupProposer
from services.worker.forward.forward_context import ForwardContext, forward_context
from services.worker.forward.kv_cache import KvCache, KvCacheSpec
from services.worker.layers.attention import Attention
from services.worker.layers.linear import Linear
from services.worker.layers.norm import RmsNorm
from services.worker.models.loader import LoadedModel
from services.worker.models.parts.decoder import DecoderModel
from services.worker.models.registry import CausalLM
from services.worker.ops import AttentionParams, SlotColumns, load_ops
from shared.request.sampling_params import SamplingOptions
from shared.step.columns import Int32Column
from tests.support.models.paged_model import attention_metadata
from tests.support.worker.worker_driver import Answer, Request, WorkerDriver
from tests.support.worker.worker_runner import WrappedModel

CYCLE = [5, 9, 2, 44, 17, 60]
REPEATING = CYCLE * 4
PENALTIES = SamplingOptions(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2)
REQUESTS = [
    Request(REPEATING, 20),
    Request([3], 24, temperature=0.8, seed=11),
    Request(REPEATING[:9], 17, temperature=1.0, top_k=5, top_p=0.9, seed=12, choice=2),
    Request(REPEATING[1:], 13, temperature=0.3, seed=13, known=(7, 5, 9)),
    Request([8, 1, 8, 1], 15, options=PENALTIES),
    Request([8, 1, 60], 14, temperature=1.1, seed=14, options=SamplingOptions(min_p=0.05, logit_bias=((9, 3.0),))),
    Request(CYCLE, 12, stop_token_ids=(1, 2), options=SamplingOptions(min_tokens=6, num_logprobs=3)),
    Request(CYCLE * 2, 16, temperature=0.6, seed=15, options=SamplingOptions(bad_words=((44,), (9, 2)))),
    Request(REPEATING[3:], 10, options=SamplingOptions(logprob_token_ids=(44, 5, 44))),
    Request([2], 1, temperature=0.5),
]  # fmt: skip

NUM_HEADS = 4
# Returns the expected drafts after some tokens, given their number.
Oracle = Callable[[list[int], int], list[int]]


class KnowingProposer(LookupProposer):
    """Knows how `requests` continue, and is wrong now and then."""

    def __init__(
        self,
        answers: Sequence[Answer],
        *,
        share_right: float,
        seed: int = 0,
        requests: Sequence[Request] = tuple(REQUESTS),
    ) -> None:
        self._texts = [request.prompt + answer.tokens for request, answer in zip(requests, answers, strict=True)]
        self._share_right = share_right
        self._rng = Random(seed)

    @override
    def look_up(self, token_ids: Int32Column, max_tokens: int) -> Int32Column:
        known = token_ids.tolist()
        text = next((text for text in self._texts if text[: len(known)] == known), [])
        right = text[len(known) : len(known) + max_tokens]
        guess = [token if self._rng.random() < self._share_right else self._rng.randrange(512) for token in right]
        return np.array(guess, np.int32)


def few_tokens(logits: Tensor, num_tokens: int = 2) -> Tensor:
    """The logits with all but the first `num_tokens` columns made unlikely."""
    return torch.cat((logits[:, :num_tokens], logits[:, num_tokens:] - 1000.0), dim=-1)


class FewTokens(WrappedModel):
    """Generates only the first tokens of its vocabulary, so that drafts are often right."""

    def __init__(self, model: CausalLM, num_tokens: int = 2) -> None:
        super().__init__(model)
        self._num_tokens = num_tokens

    @override
    def compute_logits(self, hidden: Tensor) -> Tensor:
        return few_tokens(super().compute_logits(hidden), self._num_tokens)


class TinyMtpLayers:
    """Random MTP layers with one attention each, after the layers of a tiny Llama. See `MtpLayers`."""

    num_shared_positions = 0

    def __init__(self, decoder: DecoderModel, num_layers: int) -> None:
        """Share the embedding and the rotary embedding of `decoder`."""
        ops, generator = load_ops("reference"), torch.Generator().manual_seed(5)
        size = decoder.embedding(torch.tensor([0])).shape[1]
        self.num_layers = num_layers
        self._decoder = decoder
        self._norm = RmsNorm(ops, torch.ones(size), 1e-5)

        def linear(out_features: int) -> Linear:
            return Linear(ops, torch.randn(out_features, size, generator=generator) * 0.2, torch.float32)

        # The model's own head is tied to its embedding, with which they would mostly repeat the last token.
        self._head = linear(decoder.logits_width)
        self._attentions = [
            Attention(
                ops,
                len(decoder.kv_cache_spec.layers) + layer,
                qkv=linear(2 * size),
                output=linear(size),
                num_heads=NUM_HEADS,
                num_kv_heads=NUM_HEADS // 2,
                params=AttentionParams((size // NUM_HEADS) ** -0.5),
            )
            for layer in range(num_layers)
        ]

    def forward(self, hidden: Tensor, token_ids: Tensor, positions: Tensor, layer: int) -> Tensor:
        """See `MtpLayers.forward`."""
        residual = hidden + self._norm(self._decoder.embedding(token_ids))
        attended = self._attentions[layer](self._norm(residual), self._decoder.rotary.select(positions))
        return self._norm(residual + attended)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """See `MtpLayers.compute_logits`."""
        return few_tokens(self._head(hidden))


def with_mtp(loaded: LoadedModel, num_layers: int) -> LoadedModel:
    """A tiny Llama that generates few tokens, with `num_layers` MTP layers."""
    assert isinstance(loaded.model, DecoderModel)
    model = FewTokens(loaded.model)
    model.mtp = TinyMtpLayers(loaded.model, num_layers)
    # The MTP layers have the same heads as the model.
    layers = model.kv_cache_spec.layers
    model.kv_cache_spec = KvCacheSpec(layers + layers[:1] * num_layers)
    return replace(loaded, model=model)


class CheckedProposer(DraftProposer):
    """Wraps a proposer and compares its drafts with those of an oracle."""

    def __init__(self, proposer: DraftProposer, oracle: Oracle) -> None:
        self.num_drafted = 0
        self.kv_cache_spec = proposer.kv_cache_spec
        self.reads_decodes = proposer.reads_decodes
        self.follows_steps = proposer.follows_steps
        self._proposer = proposer
        self._oracle = oracle

    @override
    def attach(self, limits: BatchLimits, kv_cache: KvCache) -> None:
        self._proposer.attach(limits, kv_cache)

    @override
    def forget(self, slots: Int32Column) -> None:
        self._proposer.forget(slots)

    @override
    def observe(self, inputs: StepInput) -> Observe | None:
        return self._proposer.observe(inputs)

    @override
    def learn(self, slots: Int32Column, num_known: Int32Column) -> None:
        self._proposer.learn(slots, num_known)

    @override
    def propose(self, rows: DraftRows) -> Drafts:
        drafts = self._proposer.propose(rows)
        assert (drafts.counts <= rows.most).all()
        assert len(drafts.token_ids) == drafts.counts.sum() <= rows.most_together
        expected = [
            token
            for known, count in zip(rows.token_ids, drafts.counts.tolist(), strict=True)
            for token in (self._oracle(known.tolist(), count) if count else ())
        ]
        self.num_drafted += len(expected)
        if drafts.device is None:
            assert drafts.token_ids.tolist() == expected
            return drafts
        compute = drafts.device.compute

        def compute_checked(columns: SlotColumns) -> Tensor:
            token_ids = compute(columns)
            assert token_ids.tolist() == expected
            return token_ids

        return replace(drafts, device=DeviceDrafts(compute_checked))


def num_accepted(driver: WorkerDriver) -> int:
    """The number of accepted drafts in all steps of a driver."""
    counts = [output.counts for output in driver.outputs if output.counts is not None]
    return sum(int(np.maximum(count - 1, 0).sum()) for count in counts)


@torch.inference_mode()
def drafts_of_model(model: CausalLM, token_ids: Sequence[int], count: int) -> list[int]:
    """The expected drafts of a draft model after `token_ids`."""
    known = list(token_ids)
    for _ in range(count):
        cache = _cache(model, len(known))
        hidden = _compute(model.forward, cache, torch.tensor(known), torch.arange(len(known)))
        known.append(int(model.compute_logits(hidden[-1:]).argmax()))
    return known[len(token_ids) :]


@torch.inference_mode()
def drafts_of_mtp(model: CausalLM, token_ids: Sequence[int], count: int) -> list[int]:
    """The expected drafts of a model's MTP layers after `token_ids`."""
    mtp = model.mtp
    assert mtp is not None
    num_known = len(token_ids)
    cache, known, positions = _cache(model, num_known + count), torch.tensor(token_ids), torch.arange(num_known - 1)
    hidden = _compute(model.forward, cache, known[:-1], positions)
    newest = []
    for layer in range(mtp.num_layers):
        hidden = _compute(mtp.forward, cache, hidden, known[1:], positions, layer)
        newest.append(hidden[-1:])
        hidden = torch.cat((torch.zeros_like(hidden[:1]), hidden[:-1]))
    drafts, state = [], newest[0]
    for place in range(count):
        drafts.append(int(mtp.compute_logits(state).argmax()))
        layer = min(place + 1, mtp.num_layers - 1)
        position = torch.tensor([num_known - 1 + place])
        state = _compute(mtp.forward, cache, state, torch.tensor(drafts[-1:]), position, layer)
    return drafts


def _cache(model: CausalLM, num_tokens: int) -> KvCache:
    return KvCache(model.kv_cache_spec, num_blocks=1, block_size=num_tokens)


def _compute(forward: Callable[..., Tensor], cache: KvCache, *args: Tensor | int) -> Tensor:
    """Call `forward` for consecutive tokens of the only sequence in `cache`."""
    positions = next(arg for arg in reversed(args) if isinstance(arg, Tensor))
    num_queries, context_len = len(positions), int(positions[-1]) + 1
    metadata = attention_metadata(
        [[0]], [num_queries], [context_len], block_size=cache.block_size, is_prefill=num_queries > 1
    )
    plan = load_ops("reference").plan_attention(metadata, cache)
    with forward_context(ForwardContext(plan, cache)):
        return forward(*args)
