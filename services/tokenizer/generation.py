"""One request's answer on its way from the cell to the client.

Tokens become text, and stop strings are looked for, when the tokens arrive: a client that reads slowly neither holds
up other requests nor lets its own run on. What has piled up leaves in one response. It is what the cell brings while
one write is blocked, which may last `--max-unread-s`, and in no case more than the text of `max_tokens` tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from google.protobuf import duration_pb2

from lockstep.internal.v1 import exchange_pb2
from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.completion import Completion
from shared.errors import ServiceError
from shared.rpc import StatusError

# The text of the token that ends the answer is left out.
_SILENT_ENDS = frozenset({common_pb2.FINISH_REASON_EOS, common_pb2.FINISH_REASON_STOP_TOKEN})


class Generation:
    """Receives one request's tokens and yields its responses.

    It ends exactly once: by a finish or by an error.
    """

    def __init__(self, completion: Completion, *, num_prompt_tokens: int, arrived_s: float) -> None:
        """Begin an answer.

        Args:
            completion: A new one.
            num_prompt_tokens: For the usage.
            arrived_s: When the request arrived, in seconds of `time.monotonic`.
        """
        self.usage = common_pb2.Usage(num_prompt_tokens=num_prompt_tokens)
        self.arrived_s = arrived_s
        self.ttft_s: float | None = None
        # Whether nothing will be received any more.
        self.is_over = False
        self._finish: tokenizer_pb2.Finish | None = None
        self._completion = completion
        self._error: ServiceError | None = None
        self._news = asyncio.Event()

    @property
    def finish_reason(self) -> common_pb2.FinishReason:
        """Why it finished; unspecified before, and after an error."""
        return common_pb2.FINISH_REASON_UNSPECIFIED if self._finish is None else self._finish.reason

    @property
    def num_tokens(self) -> int:
        """Completion tokens that are part of the answer so far."""
        return self._completion.num_tokens

    def begin(self, num_cached_tokens: int) -> None:
        """Take what the first tokens come with: how much of the prompt was cached."""
        self.usage.num_cached_tokens = num_cached_tokens

    def receive(self, token_ids: Sequence[int], end: exchange_pb2.RequestEnd | None) -> int | None:
        """Take the next tokens and, with or behind the last of them, the end. Nothing changes once it is over.

        Returns:
            When a stop string ended the answer before the cell did: the number of completion tokens up to it.
        """
        if self.is_over:
            return None
        self._news.set()
        if end is not None:
            self._receive_last(token_ids, end)
            return None
        completion = self._completion
        completion.push(token_ids)
        if not completion.has_stop_strings or completion.stop_string is None:
            return None
        self._finish_by_stop_string(completion.stop_string)
        return self.usage.num_completion_tokens

    def fail(self, error: ServiceError) -> None:
        """End with an error; what was received before still goes out. Nothing changes when it is over."""
        if not self.is_over:
            self._error = error
            self.is_over = True
            self._news.set()

    async def responses(self) -> AsyncIterator[tokenizer_pb2.GenerateResponse]:
        """Yield what has piled up whenever there is something; the last response has `finish` set.

        Raises:
            ServiceError: the answer ended with this error.
        """
        while True:
            await self._news.wait()
            self._news.clear()
            is_over = self.is_over
            response = self._take(time.monotonic())
            if response.text or response.token_ids or response.HasField("finish"):
                yield response
            if is_over:
                break
        if self._error is not None:
            raise self._error

    def _take(self, now_s: float) -> tokenizer_pb2.GenerateResponse:
        text, token_ids = self._completion.take()
        response = tokenizer_pb2.GenerateResponse(text=text, token_ids=token_ids)
        if self.ttft_s is None and token_ids:
            self.ttft_s = now_s - self.arrived_s
        if self._finish is not None:
            self._set_timings(self._finish, now_s - self.arrived_s)
            response.finish.CopyFrom(self._finish)
        return response

    def _set_timings(self, finish: tokenizer_pb2.Finish, total_s: float) -> None:
        ttft_s = total_s if self.ttft_s is None else self.ttft_s
        finish.ttft.CopyFrom(_duration(ttft_s))
        num_gaps = self.usage.num_completion_tokens - 1
        if num_gaps > 0:
            finish.mean_tpot.CopyFrom(_duration((total_s - ttft_s) / num_gaps))

    def _receive_last(self, token_ids: Sequence[int], end: exchange_pb2.RequestEnd) -> None:
        if token_ids and end.finish_reason in _SILENT_ENDS:
            self._completion.push_silent(token_ids)
        else:
            self._completion.push(token_ids)
        self.is_over = True
        if end.HasField("error"):
            self._error = StatusError(end.error)
            return
        self._completion.finish()
        if self._completion.stop_string is not None:
            self._finish_by_stop_string(self._completion.stop_string)
            return
        self.usage.num_completion_tokens = end.num_completion_tokens
        stop_token_id = end.stop_token_id if end.HasField("stop_token_id") else None
        self._finish = tokenizer_pb2.Finish(reason=end.finish_reason, stop_token_id=stop_token_id, usage=self.usage)

    def _finish_by_stop_string(self, stop_string: str) -> None:
        self.is_over = True
        self.usage.num_completion_tokens = self._completion.num_tokens
        self._finish = tokenizer_pb2.Finish(
            reason=common_pb2.FINISH_REASON_STOP_STRING, stop_string=stop_string, usage=self.usage
        )


def _duration(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration
