"""The choices of one direct call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import chain, islice

from lockstep.v1 import common_pb2, scheduler_pb2
from services.scheduler.core.results.outputs import RequestEnd
from services.scheduler.server.exchange_codec import FINISH_REASONS
from shared.errors import ServiceError
from shared.step.logprobs import Logprobs, PositionLogprobs

Response = scheduler_pb2.SchedulerServiceGenerateResponse

# Log-probabilities per response: half a millisecond's work, and far below the message size limit.
MAX_ENTRIES = 512


class ChoiceStream:
    """The unsent output of one choice; ends exactly once, with a finish or an error."""

    def __init__(self, call: TokenStream, choice: int, usage: common_pb2.Usage) -> None:
        """`usage` starts with what earlier calls produced and is updated in place."""
        self.call = call
        self.choice = choice
        self.usage = usage
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] = []
        self.end: RequestEnd | None = None
        # The end, once it has been taken.
        self.finish: Response.Finish | None = None
        self.error: ServiceError | None = None

    def take(self) -> Iterator[Response]:
        """Yield the queued output; the last response has `finish` set if the choice has finished."""
        token_ids, self.token_ids = self.token_ids, []
        logprobs, self.logprobs = self.logprobs, []
        self.usage.num_completion_tokens += len(token_ids)
        self._take_end()
        size = _num_positions(len(logprobs[0].token_ids)) if logprobs else len(token_ids) + 1
        last = max(0, len(token_ids) - 1) // size * size
        for start in range(0, last, size):
            yield self._response(token_ids[start : start + size], logprobs[start : start + size])
        if token_ids or self.finish is not None:
            yield self._response(token_ids[last:], logprobs[last:], self.finish)

    def _take_end(self) -> None:
        if self.end is None:
            return
        self.error = self.end.error
        if self.end.finish is not None:
            finish = self.end.finish
            self.finish = Response.Finish(
                reason=FINISH_REASONS[finish.reason],
                stop_token_id=finish.stop_token_id,
                usage=self.usage,
                recovery=_encode_recovery(self.end),
            )

    def _response(
        self, token_ids: list[int], logprobs: list[PositionLogprobs], finish: Response.Finish | None = None
    ) -> Response:
        encoded = map(_encode_position, logprobs)
        return Response(token_ids=token_ids, finish=finish, choice=self.choice, logprobs=encoded)


class TokenStream:
    """Queues tokens at any time and sends them as one response per choice, so steps never wait for a reader.

    The queue holds at most what the cell produces while one write is blocked (up to `--max-unread-s`), and `max_tokens`
    tokens per choice. After adding output to a stream that had none, the caller wakes it later.
    """

    def __init__(self, num_prompt_tokens: int, num_tokens: Sequence[int], open_choices: Sequence[int]) -> None:
        """Begin a stream.

        Args:
            num_tokens: For each choice, the completion tokens that the client has from earlier calls.
            open_choices: Those that have not finished, at least one.
        """
        self.has_news = False
        self.prompt_logprobs: list[Logprobs] = []
        self._usages = [
            common_pb2.Usage(num_prompt_tokens=num_prompt_tokens, num_completion_tokens=number) for number in num_tokens
        ]
        self.choices = [ChoiceStream(self, choice, self._usages[choice]) for choice in open_choices]
        self._is_awake = asyncio.Event()

    @property
    def usage(self) -> common_pb2.Usage:
        """The usage of all choices so far, counting the prompt once."""
        leader = self.choices[0].usage
        return common_pb2.Usage(
            num_prompt_tokens=leader.num_prompt_tokens,
            num_completion_tokens=sum(usage.num_completion_tokens for usage in self._usages),
            num_cached_tokens=leader.num_cached_tokens,
        )

    @property
    def refusal(self) -> ServiceError | None:
        """The error that ended the request before it began, if any."""
        end = self.choices[0].end
        return None if end is None else end.error

    def wake(self) -> None:
        """Let queued output be sent."""
        self._is_awake.set()

    async def responses(self) -> AsyncIterator[Response]:
        """Yield queued output whenever woken; the last response of a choice has `finish` set.

        Raises:
            ServiceError: a choice ended with this error, after its tokens.
        """
        num_open = len(self.choices)
        while num_open:
            await self._is_awake.wait()
            self._is_awake.clear()
            self.has_news = False
            # They go before the first token, including those that arrive while others are being written.
            while self.prompt_logprobs:
                for response in _encode_prompt(self.prompt_logprobs.pop(0)):
                    yield response
            for choice in self.choices:
                for response in () if choice.finish is not None else choice.take():
                    num_open -= int(response.HasField("finish"))
                    if not num_open:
                        response.usage.CopyFrom(self.usage)
                    yield response
            errors = [choice.error for choice in self.choices if choice.error is not None]
            if errors:
                raise errors[0]


def _encode_recovery(end: RequestEnd) -> common_pb2.Recovery | None:
    if not end.num_resumes:
        return None
    return common_pb2.Recovery(resume_count=end.num_resumes, resume_exact=end.is_resume_exact)


def _encode_prompt(logprobs: Logprobs) -> Iterator[Response]:
    positions = logprobs.positions()
    while part := list(islice(positions, _num_positions(int(logprobs.counts[0])))):
        yield Response(prompt_logprobs=map(_encode_position, part))


def _num_positions(num_entries: int) -> int:
    """All positions of a request have equally many entries."""
    return max(1, MAX_ENTRIES // num_entries)


def _encode_position(position: PositionLogprobs) -> common_pb2.PositionLogprobs:
    num_own = len(position.ranks)
    # The ranks of the likeliest tokens, which come last, are their places.
    ranks = chain(position.ranks, range(1, 1 + len(position.token_ids) - num_own))
    token, *others = (
        common_pb2.TokenLogprob(token_id=token_id, logprob=logprob, rank=rank)
        for token_id, logprob, rank in zip(position.token_ids.tolist(), position.values.tolist(), ranks, strict=True)
    )
    return common_pb2.PositionLogprobs(token=token, requested=others[: num_own - 1], top=others[num_own - 1 :])
