"""How our cell stores weights on a CPU, what it is measured beside, and the rows of its figures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tests.bench.parts.report import Row, compare
from tests.bench.peers.cpu_generation import Loads

Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Format:
    """How our cell stores weights.

    Attributes:
        flags: Of `lockstep serve`.
        peers: The keys in `PEERS` of those it is measured beside.
        throughput_targets: The least tokens/s relative to the best peer, by the number of requests.
        prefill_target: The longest prefill relative to the best peer.
        other_format: Another format of ours that is also measured.
        other_target: The least tokens/s relative to it, at 32 requests.
        weight_bytes: The size of a weight in a matrix of a layer, without scales.
        head_bytes: The same in the head.
        kv_bytes: The size of a value in the KV cache.
    """

    flags: tuple[str, ...]
    peers: tuple[str, ...]
    throughput_targets: Mapping[int, float]
    prefill_target: float
    weight_bytes: float
    head_bytes: float
    kv_bytes: int
    other_format: str | None = None
    other_target: float | None = None


FORMATS: dict[str, Format] = {
    "fp32": Format(
        flags=("--worker.dtype=float32", "--worker.quantization=none"),
        peers=("transformers",),
        throughput_targets={1: 2.0, 8: 2.0, 32: 2.0},
        prefill_target=1.0,
        weight_bytes=4,
        head_bytes=4,
        kv_bytes=4,
    ),
    "bf16": Format(
        flags=("--worker.dtype=bfloat16", "--worker.quantization=none"),
        peers=("vllm-bf16",),
        throughput_targets={1: 1.2, 8: 1.1, 32: 1.1},
        prefill_target=0.9,
        weight_bytes=2,
        head_bytes=2,
        kv_bytes=2,
    ),
    "int8": Format(
        flags=("--worker.quantization=int8", "--worker.kv-cache-dtype=bfloat16"),
        peers=("openvino-int8", "llama-cpp-q8_0", "llama-cpp-amx-q8_0", "vllm-w8a8"),
        throughput_targets={1: 1.5, 8: 1.4, 32: 1.3},
        prefill_target=0.9,
        weight_bytes=1,
        head_bytes=1,
        kv_bytes=2,
    ),
    "int4": Format(
        flags=("--worker.quantization=int4", "--worker.kv-cache-dtype=bfloat16"),
        peers=("llama-cpp-q4_0", "llama-cpp-amx-q4_0"),
        throughput_targets={1: 1.1, 8: 1.5, 32: 1.5},
        prefill_target=0.6,
        weight_bytes=0.5,
        head_bytes=1,
        kv_bytes=2,
        other_format="int8",
        other_target=0.85,
    ),
}
LARGE_FORMATS: dict[str, Format] = {
    "int8": replace(
        FORMATS["int8"],
        peers=("llama-cpp-q8_0", "llama-cpp-amx-q8_0"),
        throughput_targets={1: 1.1, 8: 1.3},
        prefill_target=1.0,
    ),
    # As the file has it, with scales: seven eighths of the layers' weights in Q4_K, the others and the head in Q6_K.
    "q4_k_m": Format(
        flags=("--worker.kv-cache-dtype=bfloat16",),
        peers=("llama-cpp-q4_k_m", "llama-cpp-amx-q4_k_m"),
        throughput_targets={1: 1.1, 8: 1.5},
        prefill_target=1.0,
        weight_bytes=0.6,
        head_bytes=0.82,
        kv_bytes=2,
    ),
}
"""Of the random Llama of 1.1 B parameters."""
_OURS = FORMATS.keys() | LARGE_FORMATS.keys()
_COMPARED_REQUESTS = 32


# Those whose products are of 8-bit integers.
INT8_FORMATS = ("int8", "int4")
# The least share of the machine's rates: reading at 1 request, products of 8-bit integers at 32.
READ_TARGET = 0.6
PRODUCTS_TARGET = 0.4


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The sizes of a Llama.

    Attributes:
        num_layer_weights: In the matrices of all layers.
        num_head_weights: In the head's matrix.
        num_kv_values: That a token adds to the KV cache.
    """

    num_layer_weights: int
    num_head_weights: int
    num_kv_values: int

    @classmethod
    def of(cls, model_dir: Path) -> ModelSize:
        """The sizes in a model's config."""
        config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        hidden, num_layers = config["hidden_size"], config["num_hidden_layers"]
        kv_width = config["num_key_value_heads"] * config["head_dim"]
        query_width = config["num_attention_heads"] * config["head_dim"]
        layer = hidden * (2 * query_width + 2 * kv_width + 3 * config["intermediate_size"])
        return cls(num_layers * layer, config["vocab_size"] * hidden, 2 * num_layers * kv_width)

    def weight_bytes(self, form: Format) -> int:
        """The size of the matrices by which every token is multiplied."""
        return int(self.num_layer_weights * form.weight_bytes + self.num_head_weights * form.head_bytes)

    def kv_bytes(self, form: Format, num_tokens: float) -> int:
        """The size of the KV cache of this many tokens."""
        return int(num_tokens * self.num_kv_values * form.kv_bytes)


def throughput_rows(name: str, loads: Loads, side_to_figures: Mapping[str, Figures]) -> Iterator[Row]:
    """Every load in a format beside the peers, from the best figures of each side."""
    form = FORMATS[name]
    yield from format_rows(name, name, form, loads, side_to_figures)
    other = side_to_figures.get(form.other_format or "")
    if other is not None and _COMPARED_REQUESTS in loads.requests:
        value, reference = (its[str(_COMPARED_REQUESTS)] for its in (side_to_figures[name], other))
        title = f"{name}, {_COMPARED_REQUESTS} requests, beside our {form.other_format}"
        yield compare(title, value, "tokens/s", reference=reference, at_least=form.other_target)


def format_rows(
    title: str, name: str, form: Format, loads: Loads, side_to_figures: Mapping[str, Figures]
) -> Iterator[Row]:
    """Every load of our side `name` beside the peers."""
    for count in loads.requests:
        least = form.throughput_targets.get(count)
        yield from load_rows(f"{title}, {count} requests", str(count), name, side_to_figures, at_least=least)
    if loads.num_prefill_tokens:
        prefill = f"{title}, prefill of {loads.num_prefill_tokens}"
        yield from load_rows(prefill, "prefill_ms", name, side_to_figures, at_most=form.prefill_target)


def read_row(name: str, form: Format, size: ModelSize, loads: Loads, step_s: float, rates: Figures) -> Row:
    """The rate at which one request's steps read weights and KV cache, beside the machine's."""
    mean_context = loads.num_prompt_tokens + loads.num_output_tokens / 2
    num_bytes = size.weight_bytes(form) + size.kv_bytes(form, mean_context)
    title = f"{name}, 1 request at {mean_context:.0f} tokens, reading"
    machine = rates["read_bytes_per_s"] / 1e9
    return compare(title, num_bytes / step_s / 1e9, "GB/s", reference=machine, at_least=READ_TARGET)


def tile_rows(name: str, rates: Figures) -> Iterator[Row]:
    """What the machine multiplies at most with tiles, if it has them."""
    for kind in ("int8", "bf16"):
        if rate := rates[f"{kind}_tile_products_per_s"]:
            yield Row(f"{name}, the machine, multiply-adds of {kind} in tiles", rate / 1e9, "G/s")


def products_row(name: str, size: ModelSize, num_requests: int, step_s: float, rates: Figures) -> Row:
    """The rate of products in the steps of several requests, attention not counted, beside the machine's for int8."""
    products = num_requests * (size.num_layer_weights + size.num_head_weights)
    title = f"{name}, {num_requests} requests, multiply-adds"
    machine = rates["int8_products_per_s"] / 1e9
    return compare(title, products / step_s / 1e9, "G/s", reference=machine, at_least=PRODUCTS_TARGET)


def load_rows(
    title: str, metric: str, own: str, side_to_figures: Mapping[str, Figures], **target: float | None
) -> Iterator[Row]:
    """Our figure beside that of the best peer, and then each peer's."""
    unit = "ms" if metric.endswith("_ms") else "tokens/s"
    peer_to_value = {side: its[metric] for side, its in side_to_figures.items() if side not in _OURS and metric in its}
    if own in side_to_figures:
        value = side_to_figures[own][metric]
        if peer_to_value:
            yield compare(title, value, unit, reference=best(metric, peer_to_value.values()), **target)
        else:
            yield Row(title, value, unit)
    for peer, value in peer_to_value.items():
        yield Row(f"{title}, {peer}", value, unit)


def best(metric: str, values: Iterable[float]) -> float:
    """The least of times, the most of everything else."""
    return min(values) if metric.endswith("_ms") else max(values)
