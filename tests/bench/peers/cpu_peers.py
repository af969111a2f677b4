"""The inference libraries beside which our CPU worker is measured, and how each is started."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.peers.cpu_files import f16_gguf, large_gguf, w8a8_checkpoint
from tests.bench.peers.cpu_generation import Loads
from tests.bench.peers.environments import LLAMA_CPP, LLAMA_CPP_AMX, OPENVINO, VLLM, Environment, LeftOutError
from tests.bench.peers.protocol import ROOT, Process, start_process

PeerArguments = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Peer:
    """A library with a kind of weights.

    Attributes:
        name: Its name in the tables.
        module: Its driver, under `tests.bench.peers`.
        environment: None means our own.
        arguments: What its driver needs of the model directory; may raise LeftOutError.
        variables: Environment variables of its process.
        cpu_flag: What the processor must have, as /proc/cpuinfo calls it.
    """

    name: str
    module: str
    environment: Environment | None
    arguments: Callable[[Path], PeerArguments]
    variables: Mapping[str, str] = field(default_factory=dict)
    cpu_flag: str | None = None

    @contextlib.contextmanager
    def start(self, arguments: PeerArguments, loads: Loads) -> Iterator[Process]:
        """Start its process with these arguments for its driver, load the model and warm up.

        Raises:
            LeftOutError: It cannot be installed or does not run on this machine.
        """
        if self.cpu_flag is not None and self.cpu_flag not in _cpu_flags():
            raise LeftOutError(f"the processor has no {self.cpu_flag}")
        python = self.environment.python() if self.environment else sys.executable
        with start_process(self.name, python, f"tests.bench.peers.{self.module}", variables=self.variables) as process:
            try:
                process.start("generate", loads=asdict(loads), **arguments)
            except RuntimeError as error:
                raise LeftOutError(str(error).strip().splitlines()[-1]) from error
            yield process


def large_arguments(model_dir: Path, kind: str) -> PeerArguments:
    """What llama.cpp's driver needs for the model of `large_model` in q8_0 or another kind; may raise LeftOutError."""
    source = large_gguf(model_dir)
    # A driver finds the file of a kind beside the source; that of q8_0 is the source here.
    return {"gguf_path": str(source.with_suffix("").with_suffix(".gguf") if kind == "q8_0" else source), "kind": kind}


def _with_model_dir(model_dir: Path) -> PeerArguments:
    return {"model_dir": str(model_dir)}


def _cpu_flags() -> frozenset[str]:
    return frozenset(Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split())


def _llama_cpp(kind: str, environment: Environment = LLAMA_CPP) -> Peer:
    has_amx = environment is LLAMA_CPP_AMX
    return Peer(
        f"llama.cpp {kind.upper()}{' with AMX' if has_amx else ''}",
        "cpu_llama_cpp",
        environment,
        lambda _: {"gguf_path": str(f16_gguf()), "kind": kind},
        cpu_flag="amx_int8" if has_amx else None,
    )


_VLLM_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
    # Compiled code.
    "VLLM_CACHE_ROOT": str(ROOT / ".cache" / "cpu-peers" / "vllm"),
    "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
}

LLAMA_CPP_Q8_0 = _llama_cpp("q8_0")
PEERS: dict[str, Peer] = {
    "transformers": Peer("transformers fp32", "cpu_transformers", None, _with_model_dir),
    "vllm-bf16": Peer("vLLM bf16", "cpu_vllm", VLLM, _with_model_dir, _VLLM_VARIABLES),
    "vllm-w8a8": Peer(
        "vLLM W8A8",
        "cpu_vllm",
        VLLM,
        lambda model_dir: {"model_dir": str(w8a8_checkpoint(model_dir))},
        _VLLM_VARIABLES,
    ),
    "openvino-int8": Peer("OpenVINO int8", "cpu_openvino", OPENVINO, lambda _: {"gguf_path": str(f16_gguf())}),
    "llama-cpp-q8_0": LLAMA_CPP_Q8_0,
    "llama-cpp-q4_0": _llama_cpp("q4_0"),
    "llama-cpp-q4_k_m": _llama_cpp("q4_k_m"),
    "llama-cpp-amx-q8_0": _llama_cpp("q8_0", LLAMA_CPP_AMX),
    "llama-cpp-amx-q4_0": _llama_cpp("q4_0", LLAMA_CPP_AMX),
    "llama-cpp-amx-q4_k_m": _llama_cpp("q4_k_m", LLAMA_CPP_AMX),
}
