"""Converts sampling options to and from a cell's internal messages.

`shared.request.sampling_params` checks ranges; the reader checks whether columns fit each other.
"""

from __future__ import annotations

import numpy as np

from lockstep.internal.v1 import sampling_pb2
from shared.request.limits import TOKEN_DTYPE
from shared.request.sampling_params import Pooling, SamplingOptions

_FLOAT_DTYPE = np.dtype("<f4")
_POOLING_TO_WIRE = {
    None: sampling_pb2.POOLING_UNSPECIFIED,
    Pooling.LAST: sampling_pb2.POOLING_LAST,
    Pooling.MEAN: sampling_pb2.POOLING_MEAN,
}
_WIRE_TO_POOLING = {number: pooling for pooling, number in _POOLING_TO_WIRE.items()}


def encode_options(options: SamplingOptions) -> sampling_pb2.SamplingOptions:
    """Floats become float32."""
    return sampling_pb2.SamplingOptions(
        min_p=options.min_p,
        repetition_penalty=None if options.repetition_penalty == 1.0 else options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        logit_bias_token_ids=np.array([token_id for token_id, _ in options.logit_bias], TOKEN_DTYPE).tobytes(),
        logit_biases=np.array([bias for _, bias in options.logit_bias], _FLOAT_DTYPE).tobytes(),
        bad_words=[np.array(word, TOKEN_DTYPE).tobytes() for word in options.bad_words],
        min_tokens=options.min_tokens,
        num_logprobs=options.num_logprobs,
        num_prompt_logprobs=options.num_prompt_logprobs,
        grammar=options.grammar,
        reasoning_begin=np.array(options.reasoning_begin, TOKEN_DTYPE).tobytes(),
        reasoning_end=np.array(options.reasoning_end, TOKEN_DTYPE).tobytes(),
        allowed_token_ids=np.array(options.allowed_token_ids, TOKEN_DTYPE).tobytes(),
        logprob_token_ids=np.array(options.logprob_token_ids, TOKEN_DTYPE).tobytes(),
        pooling=_POOLING_TO_WIRE[options.pooling],
    )


def decode_options(message: sampling_pb2.SamplingOptions) -> SamplingOptions:
    """Decode options.

    Raises:
        ValueError: a column's size is not a multiple of its dtype's, parallel columns differ in length, or the pooling
            is unknown.
    """
    token_ids = _column("logit_bias_token_ids", message.logit_bias_token_ids, TOKEN_DTYPE)
    biases = _column("logit_biases", message.logit_biases, _FLOAT_DTYPE)
    if len(token_ids) != len(biases):
        raise ValueError("logit_bias_token_ids and logit_biases differ in length")
    if message.pooling not in _WIRE_TO_POOLING:
        raise ValueError(f"the pooling {message.pooling} is unknown")
    return SamplingOptions(
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(zip(token_ids.tolist(), biases.tolist(), strict=True)),
        bad_words=tuple(_token_ids("bad_words", word) for word in message.bad_words),
        min_tokens=message.min_tokens,
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
        num_prompt_logprobs=message.num_prompt_logprobs if message.HasField("num_prompt_logprobs") else None,
        grammar=message.grammar,
        reasoning_begin=_token_ids("reasoning_begin", message.reasoning_begin),
        reasoning_end=_token_ids("reasoning_end", message.reasoning_end),
        allowed_token_ids=_token_ids("allowed_token_ids", message.allowed_token_ids),
        logprob_token_ids=_token_ids("logprob_token_ids", message.logprob_token_ids),
        pooling=_WIRE_TO_POOLING[message.pooling],
    )


def _token_ids(name: str, data: bytes) -> tuple[int, ...]:
    return tuple(_column(name, data, TOKEN_DTYPE).tolist())


def _column(name: str, data: bytes, dtype: np.dtype[np.generic]) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
    if len(data) % dtype.itemsize:
        raise ValueError(f"{name} is not a whole number of {dtype.itemsize}-byte values")
    return np.frombuffer(data, dtype)
