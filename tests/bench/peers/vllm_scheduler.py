"""vLLM V1's scheduler as a contestant. Runs in the environment `VLLM`, never in ours.

Measured is the work of vLLM's engine core between a request's arrival and its outputs, without messages:
`Request.from_engine_core_request` and `add_request`, `schedule`, and `update_from_output`. With async scheduling, its
default, a step is scheduled before the previous one has returned.
"""

from __future__ import annotations

import json
import tempfile
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request as VllmRequest
from vllm.v1.structured_output import StructuredOutputManager

from tests.bench.parts.tokens import VOCABULARY, expected_tokens
from tests.bench.peers.contestant import MAX_MODEL_LEN, MAX_NUM_BATCHED_TOKENS, Request, Sizes, StepTokens, Stopwatch
from tests.bench.peers.protocol import serve
from tests.bench.peers.scenarios import Admission, Churn, Decode, Memory

MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": MAX_MODEL_LEN,
    "eos_token_id": 2,
}


class VllmScheduler:
    """A scheduler with prefix caching and the default hash, SHA-256; the model is only a configuration."""

    def __init__(self, sizes: Sizes, *, is_async: bool = False) -> None:
        self.stopwatch = Stopwatch()
        config = _vllm_config(sizes, is_async=is_async)
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._block_hasher = get_request_block_hasher(sizes.block_size, hash_function)
        spec = FullAttentionSpec(block_size=sizes.block_size, num_kv_heads=1, head_size=64, dtype=torch.float32)
        group = KVCacheGroupSpec(["layer"], spec)
        self._scheduler = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(sizes.num_blocks, kv_cache_tensors=[], kv_cache_groups=[group]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=sizes.block_size,
            hash_block_size=sizes.block_size,
        )
        self._depth = 2 if is_async else 1
        self._in_flight: deque[SchedulerOutput] = deque()
        # By request id: tokens whose KV is computed, and tokens sampled.
        self._num_computed: dict[str, int] = {}
        self._num_prompt_tokens: dict[str, int] = {}

    def settle(self) -> None:
        """See `Contestant`."""
        freeze_gc_heap()

    def submit(self, requests: Sequence[Request]) -> None:
        """See `Contestant`."""
        for request in requests:
            message = _message_of(request)
            self._num_prompt_tokens[message.request_id] = len(request.prompt)
            with self.stopwatch.running():
                self._scheduler.add_request(VllmRequest.from_engine_core_request(message, self._block_hasher))

    def step(self) -> StepTokens:
        """See `Contestant`."""
        while len(self._in_flight) < self._depth:
            with self.stopwatch.running():
                output = self._scheduler.schedule()
            if not output.total_num_scheduled_tokens:
                break
            self._in_flight.append(output)
        output = self._in_flight.popleft()
        result = self._compute(output)
        with self.stopwatch.running():
            told = self._scheduler.update_from_output(output, result)
        return _step_tokens(told.get(0))

    def _compute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Play the model runner: each request whose prompt is complete with this step gets a token."""
        for new in output.scheduled_new_reqs:
            self._num_computed[new.req_id] = new.num_computed_tokens
        for request_id, count in output.num_scheduled_tokens.items():
            self._num_computed[request_id] += count
        ids = list(output.num_scheduled_tokens)
        positions = np.array([self._num_computed[each] - self._num_prompt_tokens[each] for each in ids], np.int64)
        tokens = expected_tokens(np.array(ids, np.int64), positions).tolist()
        sampled = [[token] if position >= 0 else [] for token, position in zip(tokens, positions, strict=True)]
        return ModelRunnerOutput(ids, {each: index for index, each in enumerate(ids)}, sampled)


def _vllm_config(sizes: Sizes, *, is_async: bool) -> VllmConfig:
    with tempfile.TemporaryDirectory() as model_dir:
        Path(model_dir, "config.json").write_text(json.dumps(MODEL_CONFIG), encoding="utf-8")
        config = VllmConfig(
            model_config=ModelConfig(
                model=model_dir, skip_tokenizer_init=True, dtype="float32", max_model_len=MAX_MODEL_LEN
            ),
            cache_config=CacheConfig(block_size=sizes.block_size, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_num_seqs=sizes.max_num_seqs,
                max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
                max_model_len=MAX_MODEL_LEN,
                is_encoder_decoder=False,
                async_scheduling=is_async,
            ),
        )
    config.cache_config.num_gpu_blocks = sizes.num_blocks
    return config


def _message_of(request: Request) -> EngineCoreRequest:
    # A separate list of ints, as decoded from a message.
    return EngineCoreRequest(
        request_id=str(request.key),
        prompt_token_ids=request.prompt.tolist(),
        mm_features=None,
        sampling_params=SamplingParams(temperature=1.0, max_tokens=request.max_tokens, ignore_eos=True),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def _step_tokens(told: EngineCoreOutputs | None) -> StepTokens:
    outputs = [] if told is None else told.outputs
    assert all(len(output.new_token_ids) == 1 for output in outputs)
    return StepTokens(
        np.array([int(output.request_id) for output in outputs], np.int64),
        np.array([output.new_token_ids[0] for output in outputs], np.int64),
        [int(output.request_id) for output in outputs if output.finished],
    )


if __name__ == "__main__":
    serve({
        "decode": partial(Decode, VllmScheduler),
        "decode_async": partial(Decode, partial(VllmScheduler, is_async=True)),
        "churn": partial(Churn, VllmScheduler),
        "admission": partial(Admission, VllmScheduler),
        "memory": partial(Memory, VllmScheduler),
    })  # fmt: skip
