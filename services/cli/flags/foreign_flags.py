"""Flags of vLLM, SGLang and llama.cpp, as data: ours where the meaning is the same, else one line that names ours.

Sources: vLLM 0.11 `vllm serve --help`, SGLang 0.5 `python -m sglang.launch_server --help`, llama.cpp b6700
`llama-server --help`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shared.network.addresses import join_address, strip_brackets

MODEL = "MODEL"
"""The positional argument, where a flag of ours is expected."""

_DEFAULT_HOST, _DEFAULT_PORT = "127.0.0.1", 8000


@dataclass(frozen=True, slots=True)
class Alias:
    """Flags of others that mean what one of ours means."""

    names: tuple[str, ...]
    ours: str
    has_value: bool = True
    form: Callable[[str], str] = str
    """The value as ours takes it."""


@dataclass(frozen=True, slots=True)
class Advice:
    """Flags of others that have no flag of ours with the same meaning."""

    names: tuple[str, ...]
    text: str
    """What to do instead."""
    ours: tuple[str, ...] = ()
    """The flags that `text` names."""


class ForeignFlagError(Exception):
    """A flag of another server cannot be taken; the message says what to give instead."""


ALIASES = (
    Alias(("-m", "--model", "--model-path", "--hf-repo", "-hf", "-hfr"), MODEL),
    Alias(("--tensor-parallel-size", "-tp", "--tp-size"), "--tp"),
    Alias(("--data-parallel-size", "-dp", "--dp-size"), "--dp"),
    Alias(("--enable-expert-parallel", "-ep"), "--ep", has_value=False),
    Alias(
        ("--ctx-size", "-c", "--context-length"), "--max-model-len", form=lambda size: "auto" if size == "0" else size
    ),
    Alias(("--uds",), "--http-listen", form=lambda path: f"unix:{path}"),
    Alias(("--model-draft", "-md", "--speculative-draft-model-path"), "--draft-model"),
    Alias(("--chat-template-file",), "--chat-template"),
    Alias(("--json-model-override-args",), "--hf-overrides"),
    Alias(("--max-num-seqs", "--max-running-requests"), "--scheduler.max-num-seqs"),
    Alias(("--max-num-batched-tokens",), "--scheduler.max-num-batched-tokens"),
    Alias(("--block-size", "--page-size"), "--scheduler.kv-cache-block-size"),
    Alias(("--enable-prefix-caching",), "--scheduler.enable-prefix-caching", has_value=False),
    Alias(
        ("--no-enable-prefix-caching", "--disable-radix-cache"), "--scheduler.no-enable-prefix-caching", has_value=False
    ),
    Alias(("--enable-chunked-prefill",), "--scheduler.enable-chunked-prefill", has_value=False),
    Alias(("--no-enable-chunked-prefill",), "--scheduler.no-enable-chunked-prefill", has_value=False),
    Alias(("--max-queued-requests",), "--scheduler.max-waiting-requests"),
    Alias(("--served-model-name", "--alias", "-a"), "--tokenizer.served-model-name"),
    Alias(("--dtype",), "--worker.dtype"),
    Alias(("--kv-cache-dtype",), "--worker.kv-cache-dtype"),
    Alias(("--gpu-memory-utilization",), "--worker.gpu-memory-utilization"),
    Alias(("--num-gpu-blocks-override",), "--worker.kv-cache-num-blocks"),
    Alias(("--enforce-eager", "--disable-cuda-graph"), "--worker.enforce-eager", has_value=False),
    Alias(("--load-format",), "--worker.load-format"),
    Alias(("--device",), "--worker.device"),
    Alias(("--threads", "-t"), "--worker.num-threads"),
    Alias(("--num-speculative-tokens", "--draft-max", "--draft"), "--worker.num-draft-tokens"),
)

ADVICE = (
    Advice(("--revision",), "name it with the model: ORG/NAME@REVISION"),
    Advice(("--tokenizer", "--tokenizer-path"), "the tokenizer is the model directory's own"),
    Advice(("--tokenizer-mode", "--skip-tokenizer-init"), "there is one mode; clients may send token ids"),
    Advice(("--trust-remote-code",), "no code of a model is run, and none is needed: leave it out"),
    Advice(("--download-dir",), "set HF_HOME or HF_HUB_CACHE in the environment"),
    Advice(("--jinja", "--no-jinja"), "the model's chat template is always used: leave it out"),
    Advice(
        ("--enable-auto-tool-choice", "--tool-call-parser", "--reasoning-parser", "--enable-reasoning"),
        "tools and reasoning work without; the parser follows the chat template, and --tokenizer.reply-parser names "
        "another",
        ("--tokenizer.reply-parser",),
    ),
    Advice(
        ("--quantization", "-q"),
        "a checkpoint says how it is quantised; --worker.quantization says what a CPU packs weights into",
        ("--worker.quantization",),
    ),
    Advice(
        ("--mem-fraction-static",),
        "--worker.gpu-memory-utilization is near: of the whole memory, the activations included",
        ("--worker.gpu-memory-utilization",),
    ),
    Advice(("--swap-space", "--cpu-offload-gb"), "nothing is moved to the host: a preempted request is computed again"),
    Advice(("--kv-cache-memory-bytes",), "--worker.kv-cache-memory-gib, in GiB", ("--worker.kv-cache-memory-gib",)),
    Advice(
        ("--n-gpu-layers", "-ngl", "--gpu-layers"),
        "all layers are on the device that --worker.device names",
        ("--worker.device",),
    ),
    Advice(
        ("--parallel", "-np"),
        "--scheduler.max-num-seqs is near: requests share the KV cache, and the context is not divided",
        ("--scheduler.max-num-seqs",),
    ),
    Advice(
        ("--batch-size", "-b", "--ubatch-size", "-ub", "--chunked-prefill-size", "--max-prefill-tokens"),
        "--scheduler.max-num-batched-tokens bounds a step",
        ("--scheduler.max-num-batched-tokens",),
    ),
    Advice(
        ("--max-total-tokens",), "--worker.kv-cache-num-blocks, in blocks of tokens", ("--worker.kv-cache-num-blocks",)
    ),
    Advice(
        ("--scheduling-policy", "--schedule-policy"),
        "--scheduler.queue-policy, with other names",
        ("--scheduler.queue-policy",),
    ),
    Advice(
        ("--scheduler-delay-factor",), "--scheduler.scheduler-delay-factor", ("--scheduler.scheduler-delay-factor",)
    ),
    Advice(
        ("--speculative-config", "--speculative-algorithm"),
        "--draft-proposer, with --draft-model for a second model",
        ("--draft-proposer", "--draft-model"),
    ),
    Advice(
        ("--ssl-certfile", "--ssl-keyfile", "--ssl-cert-file", "--ssl-key-file", "--ssl-ca-certs"),
        "TLS needs --tls-cert, --tls-key, --tls-ca and --trust-domain together",
        ("--tls-cert", "--tls-key", "--tls-ca", "--trust-domain"),
    ),
    Advice(
        ("--allowed-origins", "--allow-credentials", "--allowed-methods", "--allowed-headers"),
        "--tokenizer.cors-origin names the origins, separated by commas",
        ("--tokenizer.cors-origin",),
    ),
    Advice(("--api-key-file",), "--client-keys takes the keys' digests, with tenants", ("--client-keys",)),
    Advice(
        ("--metrics", "--enable-metrics", "--slots", "--props"),
        "/metrics is there without; --tokenizer.manage-listen has it on a port of its own",
        ("--tokenizer.manage-listen",),
    ),
    Advice(
        ("--generation-config",),
        "generation_config.json is the model's; --override-generation-config changes values",
        ("--override-generation-config",),
    ),
    Advice(
        ("--seed", "--temp", "--top-p", "--top-k", "--n-predict", "-n"),
        "a request says it; --override-generation-config changes the defaults of all",
        ("--override-generation-config",),
    ),
    Advice(
        ("--pipeline-parallel-size", "-pp", "--pp-size"),
        "layers are not split over devices: --tp splits each",
        ("--tp",),
    ),
    Advice(("--ep-size", "--expert-parallel-size"), "--ep splits the experts over all workers", ("--ep",)),
    Advice(("--nnodes", "--node-rank", "--dist-init-addr"), "`lockstep ranks` starts the ranks of one node of several"),
    Advice(
        ("--disable-log-requests", "--enable-log-requests", "--uvicorn-log-level", "--log-requests"),
        "no request's text is logged; --log-level says how much is",
        ("--log-level",),
    ),
    Advice(("--chat-template-kwargs",), "a request says it, as chat_template_kwargs"),
    Advice(("--guided-decoding-backend", "--grammar-backend"), "there is one, llguidance: leave it out"),
    Advice(("--max-logprobs",), "20 is the most that a request may ask for: leave it out"),
    Advice(("--enable-lora", "--lora-modules", "--lora", "--lora-paths"), "adapters are not served: merge them"),
    Advice(("--mmproj", "--limit-mm-per-prompt"), "of a multimodal model the text is served: leave it out"),
    Advice(
        ("--flash-attn", "-fa", "--attention-backend"), "--worker.ops-backend names kernels", ("--worker.ops-backend",)
    ),
    Advice(("--mlock", "--no-mmap", "--numa"), "weights are read into memory: leave it out"),
)

ALIAS_NAMES = tuple(name for alias in ALIASES for name in alias.names if name.startswith("--"))
"""Those that a user may have mistyped."""


def translate(argv: Sequence[str]) -> list[str]:
    """Arguments with others' flags replaced by ours; what is unknown stays.

    Raises:
        ForeignFlagError: a flag has no value, or means something that only another flag of ours can say.
    """
    name_to_alias = {name: alias for alias in ALIASES for name in alias.names}
    name_to_advice = {name: advice for advice in ADVICE for name in advice.names}
    result: list[str] = []
    place: dict[str, str] = {}
    words = iter(argv)
    for word in words:
        name, separator, value = word.partition("=")
        if name in name_to_advice:
            raise ForeignFlagError(f"{name}: {name_to_advice[name].text}")
        alias = name_to_alias.get(name)
        if alias is None and name not in ("--host", "--port"):
            result.append(word)
        elif alias is not None and not alias.has_value:
            result.append(alias.ours)
        else:
            value = value if separator else _next_value(name, words)
            if alias is None:
                place[name] = value
            else:
                result.append(value if alias.ours == MODEL else f"{alias.ours}={alias.form(value)}")
    return [*result, *_http_flags(place, argv)]


def _next_value(name: str, words: Iterator[str]) -> str:
    value = next(words, None)
    if value is None or value.startswith("-"):
        raise ForeignFlagError(f"{name} needs a value")
    return value


def _http_flags(place: dict[str, str], argv: Sequence[str]) -> list[str]:
    """The address that --host and --port name. It never becomes an insecure one: that must be said as such."""
    if not place:
        return []
    named = [word for word in argv if word.startswith(("--http-listen", "--insecure-http-bind", "--no-http"))]
    if named:
        raise ForeignFlagError(f"{' and '.join(place)} cannot be used with {named[0].partition('=')[0]}")
    port = place.get("--port", str(_DEFAULT_PORT))
    if not (port.isascii() and port.isdigit()):
        raise ForeignFlagError(f"--port: {port!r} is no number")
    return [f"--http-listen={join_address(strip_brackets(place.get('--host', _DEFAULT_HOST)), int(port))}"]
