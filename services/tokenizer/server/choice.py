"""One choice of an answer: from the cell's tokens to the responses that its client gets.

Tokens become text, and stop strings are looked for, when the tokens arrive: a client that reads slowly neither holds
up other requests nor lets its own run on. A reply is taken apart, and messages are made, when they leave.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from google.protobuf import duration_pb2

from lockstep.internal.v1 import exchange_pb2
from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.exchange.logprobs import LogprobQueue, Logprobs
from services.tokenizer.replies.parser import ReplyParser
from services.tokenizer.replies.parts import ReasoningPart, ReplyPart, TextPart
from services.tokenizer.server.completion import Completion
from shared.errors import ServiceError
from shared.rpc import StatusError

# The text of the token that ends the answer is left out, unless it is asked for.
_SILENT_ENDS = frozenset({common_pb2.FINISH_REASON_EOS, common_pb2.FINISH_REASON_STOP_TOKEN})


class Call(Protocol):
    """What a choice is a part of."""

    @property
    def arrived_s(self) -> float:
        """When it arrived, in seconds of `time.monotonic`."""

    def on_news(self, choice: Choice) -> None:
        """Take a choice that has something to send."""

    def fail(self, error: ServiceError) -> None:
        """End all choices with an error."""


@dataclass(frozen=True, slots=True)
class Extras:
    """What most choices do without.

    `includes_stop` leaves the text of the token that ends it in. `parser` takes its text apart. The queues, new ones,
    are there when log-probabilities are asked for; those of the prompt go with its first choice.
    """

    includes_stop: bool = False
    parser: ReplyParser | None = None
    logprobs: LogprobQueue | None = None
    prompt_logprobs: LogprobQueue | None = None


PLAIN = Extras()


class Choice:
    """Receives one choice's tokens and gives its responses.

    It ends exactly once: by a finish, or with its call.

    Invariant: it has been handed to its call, and waits for its turn, exactly while `has_news`.
    """

    def __init__(
        self,
        call: Call,
        completion: Completion,
        *,
        num_prompt_tokens: int,
        place: tuple[int, int] = (0, 0),
        extras: Extras = PLAIN,
    ) -> None:
        """Begin a choice.

        Args:
            call: What it is a part of.
            completion: A new one.
            num_prompt_tokens: For the usage.
            place: The number of its prompt in the call, and its own among the prompt's choices.
            extras: What it has beside its text.
        """
        self.usage = common_pb2.Usage(num_prompt_tokens=num_prompt_tokens)
        self.ttft_s: float | None = None
        self.has_news = False
        # Whether nothing will be received any more.
        self.is_over = False
        # How often it went on after what computed it was lost, and whether that cannot be told from its bytes.
        self.num_resumes = 0
        self.resumes_exactly = False
        # Those of the prompt that have been received and not taken; None where nobody asked for them.
        self.prompt_logprobs = extras.prompt_logprobs
        self._call = call
        self._completion = completion
        # Whether it is its prompt's first one, with which the prompt is counted.
        self.is_first = place[1] == 0
        self._prompt, self._number = place
        self._extras = extras
        self._adds_extras = extras.logprobs is not None or extras.parser is not None
        self._finish: tokenizer_pb2.Finish | None = None

    @property
    def finish_reason(self) -> common_pb2.FinishReason:
        """Why it finished; unspecified before, and after an error."""
        return common_pb2.FINISH_REASON_UNSPECIFIED if self._finish is None else self._finish.reason

    @property
    def num_tokens(self) -> int:
        """Completion tokens that are part of it so far."""
        return self._completion.num_tokens

    def submitted(self, num_resumes: int, *, is_exact: bool) -> None:
        """Take how often it has gone on by now, and whether its bytes are those of an undisturbed run."""
        self.num_resumes, self.resumes_exactly = num_resumes, is_exact

    def resumed(self, num_resumes: int) -> None:
        """Take how often it has gone on by now: a stop string ends it before the cell's end tells."""
        self.num_resumes = num_resumes

    def begin(self, num_cached_tokens: int) -> None:
        """Take what the first tokens come with: how much of the prompt was cached."""
        self.usage.num_cached_tokens = num_cached_tokens

    def receive(self, token_ids: Sequence[int], end: exchange_pb2.RequestEnd | None) -> int | None:
        """Take the next tokens and, with or behind the last of them, the end. Nothing changes once it is over.

        Returns:
            When a stop string ended the choice before the cell did: the number of completion tokens up to it.
        """
        if self.is_over:
            return None
        if not self.has_news:
            self.has_news = True
            self._call.on_news(self)
        if end is not None:
            self._receive_last(token_ids, end)
            return None
        completion = self._completion
        completion.push(token_ids)
        if not completion.has_stop_strings or completion.stop_string is None:
            return None
        self._finish_by_stop_string(completion.stop_string)
        return self.usage.num_completion_tokens

    def receive_logprobs(self, logprobs: Logprobs) -> None:
        """Take those of the tokens that are about to be received; they are dropped where nobody asked for them."""
        if self._extras.logprobs is not None and not self.is_over:
            self._extras.logprobs.put(logprobs)

    def receive_prompt_logprobs(self, logprobs: Logprobs) -> None:
        """Take those of the prompt's next tokens, as `receive_logprobs`."""
        if self.prompt_logprobs is None or self.is_over:
            return
        self.prompt_logprobs.put(logprobs)
        if not self.has_news:
            self.has_news = True
            self._call.on_news(self)

    def fail(self, error: ServiceError) -> None:
        """End the whole call with an error; what was received before still goes out."""
        self._call.fail(error)

    def close(self) -> None:
        """The call has failed: take nothing more."""
        self.is_over = True

    def take_prompt_logprobs(self) -> Iterator[tokenizer_pb2.GenerateResponse]:
        """The responses with those of the prompt's tokens that have been received. To be called before `take`."""
        queue = self.prompt_logprobs
        while queue is not None and queue:
            yield tokenizer_pb2.GenerateResponse(
                prompt_logprobs=queue.take(queue.max_positions), prompt=self._prompt, choice=self._number
            )

    def take(self, now_s: float) -> tokenizer_pb2.GenerateResponse | None:
        """What has piled up, as a response; None when that is nothing. With `has_news` there is still more."""
        self.has_news = False
        text, token_ids = self._completion.take()
        response = tokenizer_pb2.GenerateResponse(
            text=text, token_ids=token_ids, prompt=self._prompt, choice=self._number
        )
        if self._adds_extras:
            self._add_extras(response, token_ids)
        if token_ids and self.ttft_s is None:
            self.ttft_s = now_s - self._call.arrived_s
        if self._finish is not None and not self.has_news:
            self._set_timings(self._finish, now_s - self._call.arrived_s)
            response.finish.CopyFrom(self._finish)
            return response
        has_something = token_ids or response.text or response.reasoning or response.tool_calls
        return response if has_something else None

    def _add_extras(self, response: tokenizer_pb2.GenerateResponse, token_ids: list[int]) -> None:
        """Add log-probabilities to a response, and leave for the next one what is too much; take its text apart."""
        extras = self._extras
        if extras.logprobs is not None:
            count = extras.logprobs.max_positions
            if len(token_ids) > count:
                self._completion.put_back(token_ids[count:])
                del response.token_ids[count:]
                self.has_news = True
            response.logprobs.extend(extras.logprobs.take(len(response.token_ids)))
            assert len(response.logprobs) == len(response.token_ids), "a token without its log-probability"
        if extras.parser is not None:
            parts = extras.parser.feed(response.text)
            if self._finish is not None and not self.has_news:
                parts += extras.parser.finish()
            response.text = ""
            _add_parts(parts, response)

    def _set_timings(self, finish: tokenizer_pb2.Finish, total_s: float) -> None:
        ttft_s = total_s if self.ttft_s is None else self.ttft_s
        finish.ttft.CopyFrom(_duration(ttft_s))
        num_gaps = self.usage.num_completion_tokens - 1
        if num_gaps > 0:
            finish.mean_tpot.CopyFrom(_duration((total_s - ttft_s) / num_gaps))

    def _receive_last(self, token_ids: Sequence[int], end: exchange_pb2.RequestEnd) -> None:
        if token_ids and end.finish_reason in _SILENT_ENDS and not self._extras.includes_stop:
            self._completion.push_silent(token_ids)
        else:
            self._completion.push(token_ids)
        self.is_over = True
        # A stop string in the tokens before the error came first.
        if end.HasField("error") and self._completion.stop_string is None:
            self._call.fail(StatusError(end.error))
            return
        # The cell's count has what workers did too, but perhaps not all that schedulers did that have died.
        self.num_resumes = max(self.num_resumes, end.num_resumes)
        self._completion.finish()
        if self._completion.stop_string is not None:
            self._finish_by_stop_string(self._completion.stop_string)
            return
        self.usage.num_completion_tokens = end.num_completion_tokens
        stop_token_id = end.stop_token_id if end.HasField("stop_token_id") else None
        self._finish = tokenizer_pb2.Finish(
            reason=end.finish_reason, stop_token_id=stop_token_id, usage=self.usage, recovery=self._recovery()
        )

    def _finish_by_stop_string(self, stop_string: str) -> None:
        self.is_over = True
        self.usage.num_completion_tokens = self._completion.num_tokens
        self._finish = tokenizer_pb2.Finish(
            reason=common_pb2.FINISH_REASON_STOP_STRING,
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
        else:
            response.tool_calls.add(index=part.index, id=part.id, name=part.name, arguments=part.arguments)


def _duration(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration
