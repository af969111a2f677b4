"""One direct call's tokens on their way to its client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from lockstep.v1 import common_pb2, scheduler_pb2
from services.scheduler.batch import RequestEnd
from services.scheduler.exchange_codec import FINISH_REASONS

Response = scheduler_pb2.SchedulerServiceGenerateResponse


class TokenStream:
    """Takes tokens as they come; what has piled up leaves in one response, so a slow reader holds up nobody.

    That is what the cell brings while one write is blocked, which may last `--max-unread-s`, and in no case more than
    `max_tokens` tokens. It ends exactly once, by a finish or by an error. Whoever brings news to a stream that has
    none wakes it later.
    """

    def __init__(self, num_prompt_tokens: int, num_tokens: int) -> None:
        """Begin a stream whose client has `num_tokens` completion tokens from earlier calls."""
        self.usage = common_pb2.Usage(num_prompt_tokens=num_prompt_tokens)
        self.num_tokens = num_tokens
        self.end: RequestEnd | None = None
        self._token_ids: list[int] = []
        self._is_awake = asyncio.Event()

    @property
    def has_news(self) -> bool:
        """Whether there is something that the client has not been sent."""
        return bool(self._token_ids) or self.end is not None

    def push(self, token_id: int) -> None:
        """Take the next token."""
        self._token_ids.append(token_id)
        self.num_tokens += 1

    def wake(self) -> None:
        """Let what has piled up be sent."""
        self._is_awake.set()

    async def responses(self) -> AsyncIterator[Response]:
        """Yield what has piled up whenever the stream is woken; the last response has `finish` set.

        Raises:
            ServiceError: the answer ended with this error, behind the tokens that came before.
        """
        end = None
        while end is None:
            await self._is_awake.wait()
            self._is_awake.clear()
            end = self.end
            response = self._take()
            if response.token_ids or response.HasField("finish"):
                yield response
        if end.error is not None:
            raise end.error

    def _take(self) -> Response:
        token_ids, self._token_ids = self._token_ids, []
        return Response(token_ids=token_ids, finish=self._finish())

    def _finish(self) -> Response.Finish | None:
        if self.end is None or self.end.finish is None:
            return None
        self.usage.num_completion_tokens = self.end.num_completion_tokens
        finish = self.end.finish
        return Response.Finish(
            reason=FINISH_REASONS[finish.reason], stop_token_id=finish.stop_token_id, usage=self.usage
        )
