"""llama.cpp as a contestant, through the C API of llama-cpp-python; runs in the environment `LLAMA_CPP`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import llama_cpp
import numpy as np

from tests.bench.peers.cpu_generation import Engine, Loads, generate_with
from tests.bench.peers.protocol import serve

# llama.cpp's defaults.
_BATCH_TOKENS = 2048
_PHYSICAL_BATCH_TOKENS = 512
_FILE_TYPES = {
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "q4_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One token of a batch."""

    token_id: int
    position: int
    sequence: int
    has_logits: bool


class LlamaModel:
    """A GGUF file in memory."""

    def __init__(self, path: Path) -> None:
        llama_cpp.llama_backend_init()
        self.handle = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if self.handle is None:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self.vocabulary_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.handle))


class LlamaContext:
    """A KV cache for a number of sequences, and the computation on it; closed by `close`."""

    def __init__(self, model: LlamaModel, num_seqs: int, tokens_per_seq: int, *, unified_kv: bool) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = num_seqs * tokens_per_seq
        params.n_seq_max = num_seqs
        params.n_batch = _BATCH_TOKENS
        params.n_ubatch = _PHYSICAL_BATCH_TOKENS
        params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
        params.kv_unified = unified_kv
        self._model = model
        self._context = llama_cpp.llama_init_from_model(model.handle, params)
        self._batch = llama_cpp.llama_batch_init(_BATCH_TOKENS, 0, 1)

    def close(self) -> None:
        """Free the memory."""
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)

    def decode(self, entries: Sequence[Entry]) -> Iterator[tuple[Entry, np.ndarray[tuple[int], np.dtype[np.float32]]]]:
        """Compute the tokens; yields the logits of those that have some, [vocabulary], valid until the next one."""
        for first in range(0, len(entries), _BATCH_TOKENS):
            chunk = entries[first : first + _BATCH_TOKENS]
            self._fill(chunk)
            code = llama_cpp.llama_decode(self._context, self._batch)
            if code != 0:
                raise RuntimeError(f"llama_decode returned {code}")
            for index, entry in enumerate(chunk):
                if entry.has_logits:
                    logits = llama_cpp.llama_get_logits_ith(self._context, index)
                    yield entry, np.ctypeslib.as_array(logits, (self._model.vocabulary_size,))

    def _fill(self, entries: Sequence[Entry]) -> None:
        batch = self._batch
        for index, entry in enumerate(entries):
            batch.token[index] = entry.token_id
            batch.pos[index] = entry.position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = entry.sequence
            batch.logits[index] = entry.has_logits
        batch.n_tokens = len(entries)


class LlamaEngine:
    """Decodes all sequences in one batch, in one of the two layouts of the KV cache."""

    def __init__(self, model: LlamaModel, *, unified_kv: bool) -> None:
        self._model = model
        self._unified_kv = unified_kv

    def generate(self, prompts: Sequence[Sequence[int]], num_output_tokens: int) -> float:
        """See `Engine`; making the context is not included."""
        tokens_per_seq = len(prompts[0]) + num_output_tokens
        context = LlamaContext(self._model, len(prompts), tokens_per_seq, unified_kv=self._unified_kv)
        entries = [
            Entry(token_id, position, number, position == len(prompt) - 1)
            for number, prompt in enumerate(prompts)
            for position, token_id in enumerate(prompt)
        ]
        start = time.perf_counter()
        for _ in range(num_output_tokens):
            entries = [
                Entry(int(logits.argmax()), entry.position + 1, entry.sequence, has_logits=True)
                for entry, logits in context.decode(entries)
            ]
        seconds = time.perf_counter() - start
        context.close()
        return seconds


class Perplexity:
    """Each chunk by itself, given its true tokens, from the second one on."""

    def __init__(self, *, gguf_path: str, kind: str, chunks: Sequence[Sequence[int]]) -> None:
        self._model = LlamaModel(quantised_file(Path(gguf_path), kind))
        self._chunks = chunks

    def run(self) -> dict[str, float]:
        """Returns the perplexity."""
        losses = [loss for chunk in self._chunks for loss in self._losses(chunk)]
        return {"perplexity": float(np.exp(np.mean(losses)))}

    def _losses(self, chunk: Sequence[int]) -> Iterator[float]:
        context = LlamaContext(self._model, 1, len(chunk), unified_kv=True)
        entries = [Entry(token_id, position, 0, has_logits=True) for position, token_id in enumerate(chunk[:-1])]
        for entry, logits in context.decode(entries):
            largest = logits.max()
            yield float(largest + np.log(np.exp(logits - largest).sum()) - logits[chunk[entry.position + 1]])
        context.close()


def quantised_file(source: Path, kind: str) -> Path:
    """A GGUF file as `llama-quantize` makes it of `source`; created once, beside it. `kind` is of `_FILE_TYPES`."""
    target = source.with_suffix(f".{kind}.gguf")
    if not target.exists():
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = _FILE_TYPES[kind]
        params.allow_requantize = True
        made = target.with_suffix(".part")
        if llama_cpp.llama_model_quantize(str(source).encode(), str(made).encode(), params) != 0:
            raise RuntimeError(f"llama.cpp cannot quantise {source}")
        made.rename(target)
    return target


def _make_engines(_: Loads, *, gguf_path: str, kind: str) -> list[Engine]:
    model = LlamaModel(quantised_file(Path(gguf_path), kind))
    return [LlamaEngine(model, unified_kv=unified_kv) for unified_kv in (False, True)]


if __name__ == "__main__":
    serve({"generate": generate_with(_make_engines), "perplexity": Perplexity})
