"""Greedy completions by a bare model, in all the ways in which a worker may compute them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from tests.support.models.paged_model import PagedModel, PagedSequence


@dataclass(frozen=True)
class Way:
    """How sequences are computed; the output must not depend on it."""

    block_size: int = 16
    chunk_size: int | None = None
    """Prompt tokens per step; None means the whole prompt."""
    is_mixed: bool = False
    """Whether sequences decode in the same step as prompt chunks of others."""
    has_prefix: bool = False
    """Whether the prompts begin with cached blocks."""
    is_preempted: bool = False
    """Whether each sequence once loses its blocks, which others take, and is computed again; without `has_prefix`."""


@dataclass
class Generated:
    """A greedy completion, and the logits from which each token was chosen."""

    prompt: list[int]
    sequence: PagedSequence
    num_computed: int = 0
    known: list[int] = field(default_factory=list)
    """The tokens before the first that is still to be chosen, when it entered or came back."""
    rows: list[Tensor] = field(default_factory=list)

    @property
    def completion(self) -> list[int]:
        return self.sequence.token_ids[len(self.prompt) :]

    @cached_property
    def logits(self) -> Tensor:
        """[num_tokens, vocabulary]."""
        return torch.stack(self.rows)


def generate(paged: PagedModel, prompts: Sequence[list[int]], num_tokens: int, way: Way) -> list[Generated]:
    """Generate greedy completions in one batch."""
    batch = [_enter(paged, prompt, way) for prompt in prompts]
    while rows := [each for each in batch if len(each.rows) < num_tokens]:
        prompts_left = [each for each in rows if each.num_computed < len(each.known)]
        if prompts_left and not way.is_mixed:
            rows = prompts_left
        query_lens = [_extend_tokens(each, way.chunk_size) for each in rows]
        logits = paged.extend([each.sequence for each in rows], query_lens, is_prefill=bool(prompts_left))
        token_ids, _ = paged.ops.greedy_sample(logits)
        for each, row, token_id in zip(rows, logits, token_ids.tolist(), strict=True):
            each.num_computed = len(each.sequence.token_ids)
            if each.num_computed >= len(each.known):
                each.rows.append(row)
                each.sequence.token_ids.append(token_id)
        if way.is_preempted:
            _preempt(paged, batch, num_tokens)
    return batch


def _preempt(paged: PagedModel, batch: Sequence[Generated], num_tokens: int) -> None:
    """Take the blocks of sequences that are about halfway, each at another step."""
    for number, each in enumerate(batch):
        is_back = len(each.known) > len(each.prompt)
        if len(each.rows) == num_tokens // 2 - number and each.num_computed >= len(each.known) and not is_back:
            each.known = each.sequence.token_ids
            paged.drop(each.sequence)
            each.sequence.token_ids = []
            each.num_computed = 0


def _enter(paged: PagedModel, prompt: list[int], way: Way) -> Generated:
    if not way.has_prefix:
        return Generated(prompt, PagedSequence([]), known=prompt)
    # Two thirds of the prompt are shared with another sequence.
    num_shared = 2 * len(prompt) // 3
    other = paged.add([*prompt[:num_shared], *reversed(prompt[num_shared:])])
    paged.prefill([other])
    sequence = paged.add(prompt, prefix_of=other)
    num_cached = way.block_size * paged.num_shared(sequence, other)
    del sequence.token_ids[num_cached:]
    return Generated(prompt, sequence, num_cached, prompt)


def _extend_tokens(each: Generated, chunk_size: int | None) -> int:
    """Append the tokens that the next step computes; returns their number."""
    num_left = len(each.known) - each.num_computed
    if num_left <= 0:
        return 1
    size = min(num_left, chunk_size or num_left)
    each.sequence.token_ids += each.known[each.num_computed : each.num_computed + size]
    return size
