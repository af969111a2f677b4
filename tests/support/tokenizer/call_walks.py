"""Random replies that the grammars of calls allow, written token by token with a tokenizer that knows all markup."""

from __future__ import annotations

from functools import cache

import llguidance
import numpy as np
from tokenizers import AddedToken, Tokenizer

from services.tokenizer.replies import REPLY_PARSERS, ReasoningPart, ReplyPart, ToolCallPart
from tests.support.models.tiny_tokenizer import IM_END_ID, tiny_tokenizer

FAMILIES = sorted(name for name in REPLY_PARSERS if name != "none")


@cache
def tokenizer(*, has_markup: bool) -> Tokenizer:
    """The tiny tokenizer, with or without the markup of all families as tokens."""
    made = tiny_tokenizer()
    if has_markup:
        for name in FAMILIES:
            made.add_tokens(
                [
                    AddedToken(text, special="|" in text or text.startswith("["))
                    for text in sorted(REPLY_PARSERS[name].markup)
                ]
            )
    return made


@cache
def masking_tokenizer(*, has_markup: bool) -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(tokenizer(has_markup=has_markup).to_str(), eos_token=IM_END_ID)


def token_ids(*, has_markup: bool) -> dict[str, int]:
    """The ids of the added tokens, by their texts."""
    added = tokenizer(has_markup=has_markup).get_added_tokens_decoder()
    return {token.content: token_id for token_id, token in added.items()}


def walk(grammar: str, seed: int, *, has_markup: bool = True, begin: str = "") -> str:
    """A random text that the grammar allows: it starts with `begin`, and favours tokens that end it."""
    vocabulary = tokenizer(has_markup=has_markup)
    matcher = llguidance.LLMatcher(masking_tokenizer(has_markup=has_markup), grammar)
    assert not matcher.is_error(), matcher.get_error()
    rng = np.random.default_rng(seed)
    closing = [
        vocabulary.token_to_id(text) for text in ("}", '"', "]", "Ċ", "</think>", "<|end|>", "</arg_value>", "<")
    ]
    token_ids: list[int] = vocabulary.encode(begin).ids
    assert matcher.consume_tokens(token_ids)
    while len(token_ids) < 2000:
        allowed = np.flatnonzero(np.frombuffer(matcher.compute_logit_bias(), np.uint8))
        if IM_END_ID in allowed and rng.random() < 0.5:
            return vocabulary.decode(token_ids, skip_special_tokens=False)
        allowed = allowed[allowed != IM_END_ID]
        if not allowed.size:
            return vocabulary.decode(token_ids, skip_special_tokens=False)
        near = np.intersect1d(allowed, [token_id for token_id in closing if token_id is not None])
        token_ids.append(int(rng.choice(near if near.size and rng.random() < 0.5 else allowed)))
        assert matcher.consume_token(token_ids[-1])
    raise AssertionError("the text does not end")


def calls_in(parts: list[ReplyPart]) -> list[ToolCallPart]:
    """The calls of a reply that contains nothing else but reasoning before them."""
    calls = [part for part in parts if isinstance(part, ToolCallPart)]
    assert parts[len(parts) - len(calls) :] == calls
    assert all(isinstance(part, ReasoningPart) for part in parts[: len(parts) - len(calls)])
    return calls
