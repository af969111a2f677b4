"""Our tokenizer service as a contestant: from the bytes of a step's outputs to the text of each request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from lockstep.internal.v1 import exchange_pb2
from services.tokenizer.answer.answer import Choice, Generation
from services.tokenizer.answer.completion import Completion
from services.tokenizer.answer.request_totals import RequestTotals
from services.tokenizer.exchange.cell_requests import CellRequests
from services.tokenizer.exchange.scheduler_stream import SchedulerStream
from services.tokenizer.request.resolved_request import ResolvedRequest
from services.tokenizer.text.detokenizer import make_token_texts
from services.tokenizer.text.model_tokenizer import load_tokenizer
from services.tokenizer.text.vocabulary import Vocabulary
from shared.process.lifecycle import freeze_garbage
from shared.request.limits import TOKEN_DTYPE
from shared.request.sampling_params import SamplingParams
from tests.bench.peers.contestant import Stopwatch
from tests.bench.peers.front_end_load import Detokenize
from tests.bench.peers.protocol import serve

LOST_AFTER_S = 3600.0


class LockstepFrontEnd:
    """A replica's requests on one stream, each with the generation object that its client would read."""

    def __init__(self, model_dir: Path) -> None:
        self.stopwatch = Stopwatch()
        self._texts = make_token_texts(Vocabulary(load_tokenizer(model_dir).backend))
        self._completions: list[Completion] = []
        self._handles = np.empty(0, np.uint32)
        self._num_told = 0
        # Must outlive the requests, which refer to it; nothing measured waits on it.
        self._loop = asyncio.Runner()

    def settle(self) -> None:
        """See `FrontEnd`."""
        freeze_garbage()

    def begin(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        """See `FrontEnd`."""
        self._requests = self._loop.run(self._submit(prompts, max_tokens))

    def hand_over(self, token_ids: Sequence[int]) -> list[str]:
        """See `FrontEnd`."""
        count = len(token_ids)
        outputs = exchange_pb2.Outputs(
            handles=self._handles.tobytes(),
            first_indexes=np.full(count, self._num_told, TOKEN_DTYPE).tobytes(),
            counts=np.ones(count, TOKEN_DTYPE).tobytes(),
            token_ids=np.array(token_ids, TOKEN_DTYPE).tobytes(),
        )
        self._num_told += 1
        data = exchange_pb2.ExchangeResponse(outputs=outputs).SerializeToString()
        with self.stopwatch.running():
            self._requests.on_outputs(self._stream, exchange_pb2.ExchangeResponse.FromString(data).outputs)
        return [completion.take()[0] for completion in self._completions]

    async def _submit(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> CellRequests:
        """Submit the requests on a stream, up to building its messages."""
        requests, totals = CellRequests(LOST_AFTER_S), RequestTotals()
        self._stream = SchedulerStream(requests.make_submit)
        requests.open_stream(self._stream, exchange_pb2.CellInfo())
        handles = []
        for number, prompt in enumerate(prompts):
            request = ResolvedRequest(
                f"{number:032x}", np.array(prompt, TOKEN_DTYPE).tobytes(), SamplingParams(max_tokens)
            )
            self._completions.append(Completion(self._texts.detokenizer(), ()))
            generation = Generation(arrived_at=0.0, totals=totals)
            generation.choices.append(Choice(generation, self._completions[-1], num_prompt_tokens=len(prompt)))
            handles.append(requests.submit(request, generation.choices, arrived_at=0.0, deadline_at=None))
        self._handles = np.array(handles, np.uint32)
        num_sent = 0
        messages = self._stream.messages()
        while num_sent < len(prompts):
            num_sent += len((await anext(messages)).submits)
        return requests


if __name__ == "__main__":
    serve({"detokenize": partial(Detokenize, LockstepFrontEnd)})
