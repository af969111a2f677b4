"""Greedy completions by a model alone, in all the ways in which a worker may come to compute them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from tests.support.paged_model import PagedModel, PagedSequence


@dataclass(frozen=True)
class Way:
    """How sequences are computed; none of it may be seen in what comes out."""

    block_size: int = 16
    # Tokens of a prompt in a step; None: all of them.
    chunk_size: int | None = None
    # Whether sequences that are done with their prompts decode beside the chunks of others.
    is_mixed: bool = False
    # Whether the prompts begin with blocks that are in the cache.
    has_prefix: bool = False


@dataclass
class Generated:
    """A greedy completion, and the logits that each of its tokens was chosen from."""

    prompt: list[int]
    sequence: PagedSequence
    num_computed: int = 0
    rows: list[Tensor] = field(default_factory=list)

    @property
    def completion(self) -> list[int]:
        return self.sequence.token_ids[len(self.prompt) :]

    @cached_property
    def logits(self) -> Tensor:
        """[num_tokens, vocabulary]."""
        return torch.stack(self.rows)


def generate(paged: PagedModel, prompts: Sequence[list[int]], num_tokens: int, way: Way) -> list[Generated]:
    """Greedy completions, all in one batch, in the given way."""
    batch = [_enter(paged, prompt, way) for prompt in prompts]
    while rows := [each for each in batch if len(each.rows) < num_tokens]:
        prompts_left = [each for each in rows if each.num_computed < len(each.prompt)]
        if prompts_left and not way.is_mixed:
            rows = prompts_left
        query_lens = [_extend_tokens(each, way.chunk_size) for each in rows]
        logits = paged.extend([each.sequence for each in rows], query_lens, is_prefill=bool(prompts_left))
        token_ids, _ = paged.ops.greedy_sample(logits)
        for each, row, token_id in zip(rows, logits, token_ids.tolist(), strict=True):
            each.num_computed = len(each.sequence.token_ids)
            if each.num_computed >= len(each.prompt):
                each.rows.append(row)
                each.sequence.token_ids.append(token_id)
    return batch


def _enter(paged: PagedModel, prompt: list[int], way: Way) -> Generated:
    if not way.has_prefix:
        return Generated(prompt, PagedSequence([]))
    # Two thirds of the prompt are another sequence's.
    num_shared = 2 * len(prompt) // 3
    other = paged.add([*prompt[:num_shared], *reversed(prompt[num_shared:])])
    paged.prefill([other])
    sequence = paged.add(prompt, prefix_of=other)
    num_cached = way.block_size * paged.num_shared(sequence, other)
    del sequence.token_ids[num_cached:]
    return Generated(prompt, sequence, num_cached)


def _extend_tokens(each: Generated, chunk_size: int | None) -> int:
    """Give the sequence the tokens that the next step computes; how many they are."""
    num_left = len(each.prompt) - each.num_computed
    if num_left <= 0:
        return 1
    size = min(num_left, chunk_size or num_left)
    each.sequence.token_ids += each.prompt[each.num_computed : each.num_computed + size]
    return size
