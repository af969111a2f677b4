"""The course of one `Generate` call: check, encode, submit, stream, and one line in the log at its end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from lockstep.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.completion import Completion
from services.tokenizer.generation import Generation
from services.tokenizer.live_requests import LiveRequests
from services.tokenizer.model import ServedModel
from services.tokenizer.request import check_request, resolve_request
from services.tokenizer.request_ledger import ResolvedRequest
from services.tokenizer.scheduler_client import SchedulerClient
from shared.errors import DeadlinePassedError, ServiceError
from shared.response_writer import ResponseWriter
from shared.rpc import StatusError, reason_of

logger = logging.getLogger(__name__)


class GenerateCall:
    """Serves one call; made when it arrives."""

    def __init__(
        self,
        model: ServedModel,
        scheduler: SchedulerClient,
        live: LiveRequests,
        writer: ResponseWriter,
        *,
        time_left_s: float | None,
    ) -> None:
        """Take in a call, whose client waits `time_left_s` for its answer; None is for ever."""
        self._model = model
        self._scheduler = scheduler
        self._live = live
        self._writer = writer
        self._arrived_s = time.monotonic()
        self._deadline_s = None if time_left_s is None else self._arrived_s + time_left_s
        # What the log tells of the request: ids, counts and durations, never text.
        self._facts: dict[str, str | int | float] = {}

    async def serve(self, request: tokenizer_pb2.GenerateRequest) -> None:
        """Write all responses to the call.

        Raises:
            ServiceError: the request is refused, or its answer ended with an error.
        """
        outcome: str | None = "INTERNAL"
        try:
            outcome = await self._serve(request)
        except StatusError as error:
            outcome = reason_of(error.status)
            raise
        except ServiceError as error:
            outcome = error.reason
            raise
        except asyncio.CancelledError:
            outcome = "CANCELLED"
            raise
        finally:
            logger.info("request ended", extra={**self._facts, "outcome": outcome, "total_ms": self._elapsed_ms()})

    async def _serve(self, request: tokenizer_pb2.GenerateRequest) -> str:
        """Returns the finish reason's name."""
        self._live.check_open()
        checked = check_request(request, model_name=self._model.name, limits=self._scheduler.cell().limits)
        self._facts["request_id"] = checked.request_id
        with self._live.admit(checked.request_id):
            prompt_token_ids = await self._model.prompts.encode(checked.prompt)
            # Encoding takes its time: the cell may be another one by now.
            resolved = resolve_request(checked, prompt_token_ids, self._scheduler.cell().limits)
            self._check_deadline()
            return await self._stream(resolved, checked.stop_strings)

    def _check_deadline(self) -> None:
        if self._deadline_s is not None and time.monotonic() >= self._deadline_s:
            raise DeadlinePassedError("the deadline passed before the request reached the cell")

    async def _stream(self, request: ResolvedRequest, stop_strings: Sequence[str]) -> str:
        accepted = tokenizer_pb2.Accepted(
            request_id=request.request_id,
            model=self._model.name,
            num_prompt_tokens=request.num_prompt_tokens,
            max_tokens=request.sampling.max_tokens,
            seed=request.sampling.seed,
        )
        generation = Generation(
            Completion(self._model.make_detokenizer(), stop_strings),
            num_prompt_tokens=accepted.num_prompt_tokens,
            arrived_s=self._arrived_s,
        )
        requests = self._scheduler.requests
        handle = requests.submit(request, generation, arrived_s=self._arrived_s, deadline_s=self._deadline_s)
        self._live.begin(request.request_id, generation)
        try:
            await self._writer.write(tokenizer_pb2.GenerateResponse(accepted=accepted))
            async for response in generation.responses():
                await self._writer.write(response)
        finally:
            requests.abort(handle)
            self._note(generation)
        return common_pb2.FinishReason.Name(generation.finish_reason).removeprefix("FINISH_REASON_")

    def _note(self, generation: Generation) -> None:
        self._facts["num_prompt_tokens"] = generation.usage.num_prompt_tokens
        self._facts["num_cached_tokens"] = generation.usage.num_cached_tokens
        self._facts["num_completion_tokens"] = generation.num_tokens
        if generation.ttft_s is not None:
            self._facts["ttft_ms"] = round(1e3 * generation.ttft_s, 3)

    def _elapsed_ms(self) -> float:
        return round(1e3 * (time.monotonic() - self._arrived_s), 3)
