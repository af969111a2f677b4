"""One call's answer, with its choices interleaved.

What has accumulated for a choice is sent in one response: at most what arrives while one write is blocked, which may
last `--max-unread-s`, and never more than `max_tokens` tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.server.choice import Choice
from services.tokenizer.server.request_totals import RequestTotals
from shared.errors import ServiceError


class Generation:
    """Yields the responses of all choices of one call, until the last one has finished or an error ends it.

    Invariant: `_fresh` are the choices that have news and have not had their turn, in the order of their news.
    """

    def __init__(self, *, arrived_at: float, totals: RequestTotals) -> None:
        """`arrived_at` is in seconds of `time.monotonic`; the `choices` are added later."""
        self.arrived_at = arrived_at
        self.totals = totals
        self.choices: list[Choice] = []
        self._fresh: list[Choice] = []
        self._error: ServiceError | None = None
        # What `responses` waits for. An event would cost twice as much, and every token passes here.
        self._news: asyncio.Future[None] | None = None

    @property
    def finish_reasons(self) -> list[common_pb2.FinishReason]:
        """The choices' finish reasons."""
        return [choice.finish_reason for choice in self.choices]

    @property
    def num_tokens(self) -> int:
        """Completion tokens so far."""
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def num_resumes(self) -> int:
        """Resumes of all choices so far."""
        return sum(choice.num_resumes for choice in self.choices)

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the call's arrival to the first token sent; None before that."""
        return min((choice.ttft_s for choice in self.choices if choice.ttft_s is not None), default=None)

    def usage(self) -> common_pb2.Usage:
        """The usage of all choices; each prompt is counted once."""
        firsts = [choice.usage for choice in self.choices if choice.is_first]
        return common_pb2.Usage(
            num_prompt_tokens=sum(usage.num_prompt_tokens for usage in firsts),
            num_cached_tokens=sum(usage.num_cached_tokens for usage in firsts),
            num_completion_tokens=sum(choice.usage.num_completion_tokens for choice in self.choices),
            num_reasoning_tokens=sum(choice.usage.num_reasoning_tokens for choice in self.choices),
        )

    def on_news(self, choice: Choice) -> None:
        """A choice has something to send."""
        self._fresh.append(choice)
        self._wake()

    def fail(self, error: ServiceError) -> None:
        """End with an error, unless over; what was received before is still sent."""
        if self._error is not None or self._has_all_finishes():
            return
        self._error = error
        for choice in self.choices:
            choice.close()
        self._wake()

    async def responses(self) -> AsyncIterator[tokenizer_pb2.GenerateResponse]:
        """Yield what has accumulated whenever there is something; the last response has `usage` set.

        Raises:
            ServiceError: it ended the answer.
        """
        num_unfinished = len(self.choices)
        while num_unfinished:
            if not self._fresh and self._error is None:
                self._news = asyncio.get_running_loop().create_future()
                await self._news
            fresh, self._fresh = self._fresh, []
            for choice in fresh:
                if choice.prompt_logprobs is not None:
                    for prompt_response in choice.take_prompt_logprobs():
                        yield prompt_response
                response = choice.take(time.monotonic())
                if choice.has_news:
                    # Its next turn comes after the other choices'.
                    self.on_news(choice)
                if response is None:
                    continue
                if response.HasField("finish"):
                    num_unfinished -= 1
                    if not num_unfinished:
                        response.usage.CopyFrom(self.usage())
                yield response
            if self._error is not None and not self._fresh:
                raise self._error

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _has_all_finishes(self) -> bool:
        return common_pb2.FINISH_REASON_UNSPECIFIED not in self.finish_reasons
