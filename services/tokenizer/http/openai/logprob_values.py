"""Log-probabilities as OpenAI's API and vLLM's extensions show them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lockstep.v1 import common_pb2

# JSON has no infinity; vLLM shows this.
_LEAST = -9999.0


def chat_logprobs(positions: Iterable[common_pb2.PositionLogprobs], *, by_id: bool) -> dict[str, Any]:
    """`logprobs` of a chat's choice. Requested tokens follow the likeliest ones, unless they are among them."""
    return {
        "content": [
            {
                **_entry(position.token, by_id=by_id),
                "top_logprobs": [_entry(token, by_id=by_id) for token in _listed(position)],
            }
            for position in positions
        ],
        "refusal": None,
    }


class CompletionLogprobs:
    """Makes `logprobs` of one completion's choice; its offsets go on from piece to piece."""

    def __init__(self, *, by_id: bool) -> None:
        self._by_id = by_id
        self._offset = 0

    def values(
        self, positions: Iterable[common_pb2.PositionLogprobs], *, first_text: str | None = None
    ) -> dict[str, Any]:
        """Log-probabilities of the next tokens; `first_text` is the prompt's first token, which has none."""
        tokens: list[str] = []
        values: list[float | None] = []
        likeliest: list[dict[str, float] | None] = []
        offsets: list[int] = []
        if first_text is not None:
            tokens, values, likeliest, offsets = [first_text], [None], [None], [self._offset]
            self._offset += len(first_text)
        for position in positions:
            tokens.append(_name(position.token, by_id=self._by_id))
            values.append(_value(position.token))
            likeliest.append(self._likeliest(position))
            offsets.append(self._offset)
            self._offset += len(position.token.text)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": likeliest, "text_offset": offsets}

    def _likeliest(self, position: common_pb2.PositionLogprobs) -> dict[str, float]:
        found: dict[str, float] = {}
        # Different tokens may have one text: the likelier one stays.
        for token in (*_listed(position), position.token):
            found.setdefault(_name(token, by_id=self._by_id), _value(token))
        return found


def prompt_logprobs(positions: Sequence[common_pb2.PositionLogprobs]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: the first token has none."""
    return [None, *(_by_id(position) for position in positions)]


def _by_id(position: common_pb2.PositionLogprobs) -> dict[str, Any]:
    return {
        str(token.token_id): {"logprob": _value(token), "rank": token.rank, "decoded_token": token.text}
        for token in (position.token, *position.top)
    }


def _listed(position: common_pb2.PositionLogprobs) -> list[common_pb2.TokenLogprob]:
    listed = list(position.top)
    known = {token.token_id for token in listed}
    return listed + [token for token in position.requested if token.token_id not in known]


def _entry(token: common_pb2.TokenLogprob, *, by_id: bool) -> dict[str, Any]:
    return {
        "token": _name(token, by_id=by_id),
        "logprob": _value(token),
        "bytes": list(token.raw_bytes or token.text.encode()),
    }


def _name(token: common_pb2.TokenLogprob, *, by_id: bool) -> str:
    return f"token_id:{token.token_id}" if by_id else token.text


def _value(token: common_pb2.TokenLogprob) -> float:
    return max(token.logprob, _LEAST)
