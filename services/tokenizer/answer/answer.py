"""One call's answer: turns the cell's tokens into responses for the client.

             Choice.receive                                 Choice.take, Generation.responses
    tokens  --------------->  Completion  -------------------------------------------------->  responses
                              tokens -> text -> parts of the reply -> certain text
                               Detokenizer  ReplyParser         StopMatcher

Detokenizing, parsing and the search for stop strings do not wait for the client: a slow one neither delays other
requests nor lets its own generation run past a stop string. What has accumulated for a choice is sent in one response:
at most what arrives while one write is blocked, which may last `--max-unread-s`, and never more than `max_tokens`
tokens.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass

from lockstep.internal.v1 import exchange_pb2
from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.answer.choice_clock import ChoiceClock
from services.tokenizer.answer.completion import Completion
from services.tokenizer.answer.logprobs import LogprobColumns, LogprobQueue
from services.tokenizer.answer.request_totals import RequestTotals
from services.tokenizer.replies.parts import ReasoningPart, ReplyPart, TextPart
from services.tokenizer.tracing.choice_times import ChoiceTimes
from shared.errors import InternalError, ServiceError
from shared.network.statuses import StatusError
from shared.step.columns import Float32Column

logger = logging.getLogger(__name__)

# For these, the text of the token that ends the answer is left out unless the client asks for it.
_SILENT_ENDS = frozenset({common_pb2.FINISH_REASON_EOS, common_pb2.FINISH_REASON_STOP_TOKEN})


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
        ttfts_s = (choice.clock.ttft_s for choice in self.choices)
        return min((ttft_s for ttft_s in ttfts_s if ttft_s is not None), default=None)

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
            choice.is_over = True
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


@dataclass(frozen=True, slots=True)
class Extras:
    """Options that most choices do not use. Queues must be new."""

    includes_stop: bool = False
    """Whether to keep the text of the token that ends the choice."""
    is_empty: bool = False
    """Whether the choice has no tokens: those that the cell computes are dropped."""
    logprobs: LogprobQueue | None = None
    """None unless requested."""
    prompt_logprobs: LogprobQueue | None = None
    """None unless requested."""
    times: ChoiceTimes | None = None
    """None unless the request is traced."""
    vectors: dict[int, Float32Column] | None = None
    """Where the vector goes, by the prompt's index; None unless requested."""


PLAIN = Extras()


class Choice:
    """Receives one choice's tokens and makes its responses, until it ends with a finish or with its call.

    Invariant: the choice is in its call's queue of choices with news exactly while `has_news`.
    """

    def __init__(
        self,
        generation: Generation,
        completion: Completion,
        *,
        num_prompt_tokens: int,
        place: tuple[int, int] = (0, 0),
        extras: Extras = PLAIN,
    ) -> None:
        """`completion` must be new; `place` is the prompt's index in the call and the choice's in the prompt."""
        self.usage = common_pb2.Usage(num_prompt_tokens=num_prompt_tokens)
        self.has_news = False
        # Whether nothing will be received any more.
        self.is_over = False
        # How often it was resumed after a loss, and whether resuming changes no byte of its output.
        self.num_resumes = 0
        self.resumes_exactly = False
        # The prompt's log-probabilities that have not been taken yet; None if they were not requested.
        self.prompt_logprobs = extras.prompt_logprobs
        self._generation = generation
        self._completion = completion
        # The prompt's tokens are counted with its first choice.
        self.is_first = place[1] == 0
        self._prompt, self._number = place
        counted = num_prompt_tokens if self.is_first else 0
        self.clock = ChoiceClock(generation.arrived_at, counted, generation.totals, extras.times)
        self._extras = extras
        self._finish: tokenizer_pb2.Finish | None = None

    @property
    def finish_reason(self) -> common_pb2.FinishReason:
        """Why it finished; unspecified before that and after an error."""
        return common_pb2.FINISH_REASON_UNSPECIFIED if self._finish is None else self._finish.reason

    @property
    def num_tokens(self) -> int:
        """Completion tokens so far."""
        return self._completion.num_tokens

    def submitted(self, num_resumes: int, *, is_exact: bool) -> None:
        """Submitted, or resubmitted; `is_exact` if resumes in this cell change no byte of the output."""
        self.num_resumes, self.resumes_exactly = num_resumes, is_exact
        if self.clock.times is not None:
            self.clock.times.note_submission(time.monotonic())

    def resumed(self, num_resumes: int) -> None:
        """Resumed inside the cell, now `num_resumes` times in total; counts if a stop string ends the choice."""
        self.num_resumes = num_resumes
        if self.clock.times is not None:
            self.clock.times.note_resume(time.monotonic())

    def begin(self, num_cached_tokens: int, queue_s: float | None, prefill_s: float | None = None) -> None:
        """Called once, before the first tokens.

        Args:
            num_cached_tokens: Tokens of the prompt that were cached.
            queue_s: The time in the cell's queues; None if it is not known.
            prefill_s: The time since; None if it is not known.
        """
        self.usage.num_cached_tokens = num_cached_tokens
        self.clock.start(queue_s, prefill_s)

    def receive(self, token_ids: Sequence[int], end: exchange_pb2.RequestEnd | None) -> int | None:
        """Take the next tokens and, with the last ones, the end; ignored once the choice is over.

        Returns:
            The completion tokens at which a stop string just ended the choice, else None.
        """
        if self.is_over:
            return None
        if not self.has_news:
            self.has_news = True
            self._generation.on_news(self)
        try:
            return self._receive(token_ids, end)
        except Exception as error:  # noqa: BLE001 - a bug in a parser must not end the stream that all requests share
            # Its text may contain the reply's.
            logger.error("a reply could not be read", extra={"error_type": type(error).__name__})
            self._generation.fail(InternalError("the reply could not be read"))
            return None

    def receive_logprobs(self, logprobs: LogprobColumns) -> None:
        """Take the log-probabilities of the next `receive`'s tokens; dropped unless requested."""
        if self._extras.logprobs is not None and not self.is_over:
            self._extras.logprobs.put(logprobs)

    def receive_prompt_logprobs(self, logprobs: LogprobColumns) -> None:
        """Take the log-probabilities of the prompt's next tokens; dropped unless requested."""
        if self.prompt_logprobs is None or self.is_over:
            return
        self.prompt_logprobs.put(logprobs)
        if not self.has_news:
            self.has_news = True
            self._generation.on_news(self)

    def receive_vector(self, values: Float32Column) -> None:
        """Take the prompt's vector; dropped unless requested."""
        if self._extras.vectors is not None and not self.is_over:
            self._extras.vectors[self._prompt] = values

    def fail(self, error: ServiceError) -> None:
        """End the whole call; what was received before is still sent."""
        self._generation.fail(error)

    def take_prompt_logprobs(self) -> Iterator[tokenizer_pb2.GenerateResponse]:
        """Yield the prompt log-probabilities received so far. Must be called before `take`."""
        queue = self.prompt_logprobs
        while queue is not None and queue:
            yield tokenizer_pb2.GenerateResponse(
                prompt_logprobs=queue.take(queue.max_positions), prompt=self._prompt, choice=self._number
            )

    def take(self, now: float) -> tokenizer_pb2.GenerateResponse | None:
        """Take what has accumulated; None if there is nothing. `has_news` then says if more is left."""
        self.has_news = False
        text, token_ids = self._completion.take()
        response = tokenizer_pb2.GenerateResponse(text=text, token_ids=token_ids)
        if self._prompt or self._number:
            response.prompt, response.choice = self._prompt, self._number
        if self._extras.logprobs is not None:
            self._add_logprobs(response, token_ids, self._extras.logprobs)
        if self._completion.has_parser:
            _add_parts(self._completion.take_parts(), response)
            self.has_news = self.has_news or self._completion.has_parts
        if token_ids:
            self.clock.leave(now, len(token_ids))
        if self._finish is not None and not self.has_news:
            if self._extras.is_empty:
                self.clock.leave(now, 0)
            self.clock.finish(now, self._finish, self.usage)
            response.finish.CopyFrom(self._finish)
            return response
        has_something = token_ids or response.text or response.reasoning or response.tool_calls
        return response if has_something else None

    def _add_logprobs(
        self, response: tokenizer_pb2.GenerateResponse, token_ids: list[int], logprobs: LogprobQueue
    ) -> None:
        """Excess tokens leave `token_ids` for the next response."""
        count = logprobs.max_positions
        if len(token_ids) > count:
            self._completion.put_back(token_ids[count:])
            del response.token_ids[count:], token_ids[count:]
            self.has_news = True
        response.logprobs.extend(logprobs.take(len(response.token_ids)))
        assert len(response.logprobs) == len(response.token_ids), "a token without its log-probability"

    def _receive(self, token_ids: Sequence[int], end: exchange_pb2.RequestEnd | None) -> int | None:
        if self._extras.is_empty:
            token_ids = ()
        if end is not None:
            self._receive_last(token_ids, end)
            return None
        completion = self._completion
        completion.push(token_ids)
        if completion.is_over:
            completion.finish()
        if completion.has_stop_strings and completion.stop_string is not None:
            self._finish_by_stop_string(completion.stop_string)
        elif completion.is_over:
            self._finish_by_call()
        else:
            return None
        return self.usage.num_completion_tokens

    def _receive_last(self, token_ids: Sequence[int], end: exchange_pb2.RequestEnd) -> None:
        if token_ids and end.finish_reason in _SILENT_ENDS and not self._extras.includes_stop:
            self._completion.push_silent(token_ids)
        else:
            self._completion.push(token_ids)
        self.is_over = True
        if self.clock.times is not None and end.HasField("queue_time_us"):
            self.clock.times.note_end(1e-6 * end.queue_time_us)
        # A stop string or a last call in the tokens before the error takes precedence.
        if end.HasField("error") and self._completion.stop_string is None and not self._completion.is_over:
            self._generation.fail(StatusError(end.error))
            return
        # The cell's count includes resumes after the loss of a worker, but may miss those under a dead scheduler.
        self.num_resumes = max(self.num_resumes, end.num_resumes)
        self._completion.finish(is_cut=end.finish_reason != common_pb2.FINISH_REASON_EOS)
        if self._completion.stop_string is not None:
            self._finish_by_stop_string(self._completion.stop_string)
        elif self._completion.is_over:
            self._finish_by_call()
        elif self._extras.is_empty:
            self._finish_with(common_pb2.FINISH_REASON_MAX_TOKENS, 0)
        else:
            stop_token_id = end.stop_token_id if end.HasField("stop_token_id") else None
            self._finish_with(end.finish_reason, end.num_completion_tokens, stop_token_id=stop_token_id)

    def _finish_by_stop_string(self, stop_string: str) -> None:
        self.is_over = True
        self._finish_with(common_pb2.FINISH_REASON_STOP_STRING, self._completion.num_tokens, stop_string=stop_string)

    def _finish_by_call(self) -> None:
        self.is_over = True
        self._finish_with(common_pb2.FINISH_REASON_EOS, self._completion.num_tokens)

    def _finish_with(
        self,
        reason: common_pb2.FinishReason,
        num_tokens: int,
        *,
        stop_token_id: int | None = None,
        stop_string: str | None = None,
    ) -> None:
        self.usage.num_completion_tokens = num_tokens
        self.usage.num_reasoning_tokens = self._completion.num_reasoning_tokens
        self._finish = tokenizer_pb2.Finish(
            reason=reason,
            stop_token_id=stop_token_id,
            stop_string=stop_string,
            usage=self.usage,
            recovery=self._recovery(),
        )

    def _recovery(self) -> common_pb2.Recovery | None:
        if not self.num_resumes:
            return None
        return common_pb2.Recovery(resume_count=self.num_resumes, resume_exact=self.resumes_exactly)


def _add_parts(parts: Iterable[ReplyPart], response: tokenizer_pb2.GenerateResponse) -> None:
    for part in parts:
        if isinstance(part, TextPart):
            response.text += part.text
        elif isinstance(part, ReasoningPart):
            response.reasoning += part.text
        elif part.id or not response.tool_calls:
            response.tool_calls.add(index=part.index, id=part.id, name=part.name, arguments=part.arguments)
        else:
            response.tool_calls[-1].arguments += part.arguments
