"""vLLM V1's front end as a contestant. Runs in the environment `VLLM`, never in ours.

Measured is how `AsyncLLM` handles a message of the engine core: decode it, and process its outputs in chunks, up to
each request's queue; with its default statistics, or without.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from vllm import envs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tokenizers import get_tokenizer
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.metrics.stats import IterationStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.bench.peers.contestant import Stopwatch
from tests.bench.peers.front_end_load import Detokenize
from tests.bench.peers.protocol import serve


class VllmFrontEnd:
    """An output processor with the model's tokenizer, and one queue per request."""

    def __init__(self, model_dir: Path, *, keep_statistics: bool = False) -> None:
        self.stopwatch = Stopwatch()
        self._keeps_statistics = keep_statistics
        self._processor = OutputProcessor(get_tokenizer(str(model_dir)), log_stats=keep_statistics)
        self._encoder = MsgpackEncoder()
        self._decoder = MsgpackDecoder(EngineCoreOutputs)
        self._queues: list[RequestOutputCollector] = []

    def settle(self) -> None:
        """See `FrontEnd`."""
        freeze_gc_heap()

    def begin(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        """See `FrontEnd`."""
        for number, prompt in enumerate(prompts):
            params = SamplingParams(
                temperature=1.0, max_tokens=max_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
            )
            request = EngineCoreRequest(
                request_id=f"{number:032x}",
                prompt_token_ids=list(prompt),
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                arrival_time=0.0,
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
                external_req_id=f"{number:032x}",
            )
            queue = RequestOutputCollector(RequestOutputKind.DELTA, request.request_id)
            self._queues.append(queue)
            self._processor.add_request(request, None, queue=queue)

    def hand_over(self, token_ids: Sequence[int]) -> list[str]:
        """See `FrontEnd`."""
        outputs = [EngineCoreOutput(f"{number:032x}", [token_id]) for number, token_id in enumerate(token_ids)]
        message = EngineCoreOutputs(outputs=outputs, weight_version="default")
        frames = [bytes(frame) for frame in self._encoder.encode(message)]
        with self.stopwatch.running():
            self._process(frames)
        return [self._take(queue) for queue in self._queues]

    def _process(self, frames: Sequence[bytes]) -> None:
        message = self._decoder.decode(frames)
        statistics = IterationStats() if self._keeps_statistics else None
        chunk_size = envs.VLLM_V1_OUTPUT_PROC_CHUNK_SIZE
        for start in range(0, len(message.outputs), chunk_size):
            self._processor.process_outputs(
                message.outputs[start : start + chunk_size],
                message.timestamp,
                statistics,
                weight_version=message.weight_version,
            )

    def _take(self, queue: RequestOutputCollector) -> str:
        output = queue.get_nowait()
        assert output is not None
        text: str = output.outputs[0].text
        return text


if __name__ == "__main__":
    serve({
        "detokenize": partial(Detokenize, VllmFrontEnd),
        "detokenize_with_statistics": partial(Detokenize, partial(VllmFrontEnd, keep_statistics=True)),
    })  # fmt: skip
