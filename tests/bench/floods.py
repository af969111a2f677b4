"""What a quiet tenant notices of another one's flood.

    python -m tests.bench.floods models/smollm2-135m-instruct --json floods.json

Both have keys, the bounds let the flood in, and the flood is made by a process of its own; this one has only the quiet
client, which asks one call after the other. For each flood, from its first moment on and for `--seconds`, in which the
flood must have come:

- calls of the quiet client that were refused;
- how much longer than without the flood it waits for `accepted`, in the middle and at most. Its floor is what gRPC
  takes to let in the calls that have arrived before, one by one: who calls is known only then;
- the most steps of the scheduler until a first token;
- links between tokenizer and scheduler that were lost.

What is measured is the door and the scheduler. A flood of long prompts, which a CPU would compute for minutes, comes to
a cell whose model is one small layer of random weights, with the tokenizer, the chat template and the context length of
the one that is given: texts are encoded, blocks are taken and steps are planned as ever, and a step takes milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc

from lockstep.v1 import tokenizer_pb2_grpc
from shared.network.rpc import make_channel
from shared.tenants.tenant import Tenant
from tests.bench.parts.report import Row, limit, report
from tests.support.cells.cell import Cell, start_cell
from tests.support.clients.client import connect, token_request
from tests.support.clients.flood_process import KINDS, LONG, run_flood
from tests.support.clients.key_files import key_line, write_keys
from tests.support.clients.tenant_replica import open_tenant_replica
from tests.support.system.patience import PATIENCE_S
from tests.support.system.ports import free_port

LOUD_KEY, QUIET_KEY = "sk-loud", "sk-quiet"
QUIET, WITNESS = Tenant("quiet"), Tenant("witness")
# With prompts that a CPU computes for seconds.
LONG_PROMPTS = frozenset({"prompts"})
NUM_CALLS = {"streams": 5000, "choices": 600, "chats": 200, "grammars": 100, "prompts": 64, "http": 3000}
LOST_LINKS = ("a replica is silent", "no link to the scheduler")
# The goals.
MAX_DELAY_S = 0.5
MAX_STEPS = 6
_PAUSE_S = 0.1
_ALONE_S = 5.0
_NUM_COUNTS = 5
_SMALL_LAYER = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "head_dim": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
_OF_WEIGHTS = ("*.safetensors", "manifest.json", "config.json")


def main() -> None:
    """Flood a cell in each way, print the table, write the JSON."""
    args = _parse_args()
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        small_dir = _write_small_model(args.model_dir, Path(folder) / "small")
        keys = write_keys(Path(folder) / "keys", key_line(LOUD_KEY, "loud"), key_line(QUIET_KEY, QUIET.name))
        flags = (
            f"--client-keys={keys}",
            f"--http-listen=127.0.0.1:{port}",
            "--tokenizer.max-http-connections=8192",
            "--scheduler.max-waiting-requests=10000",
            f"--scheduler.max-num-seqs={args.slots}",
        )
        rows: list[Row] = []
        for kind in args.floods:
            model = (small_dir, "--worker.load-format=dummy") if kind in LONG_PROMPTS else (args.model_dir,)
            # A cell for each, so that none has what another has left behind.
            with start_cell(*model, *flags) as cell:
                num_calls = max(2, round(NUM_CALLS[kind] * args.share))
                rows += asyncio.run(_measure(cell, kind, num_calls, f"127.0.0.1:{port}", args.seconds))
    report(rows, args.json)


def _write_small_model(model_dir: Path, small_dir: Path) -> Path:
    """A model of one small layer that has everything but its weights from another; returns its directory."""
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    shutil.copytree(model_dir, small_dir, ignore=shutil.ignore_patterns(*_OF_WEIGHTS))
    (small_dir / "config.json").write_text(json.dumps(config | _SMALL_LAYER), encoding="utf-8")
    return small_dir


async def _measure(cell: Cell, kind: str, num_calls: int, http_address: str, seconds: float) -> list[Row]:
    async with make_channel(cell.address) as channel, connect(cell) as client:
        alone, refused = await _ask(channel, min(seconds, _ALONE_S))
        assert not refused, refused
        num_lost = _count_lost_links(cell)
        async with run_flood(kind, num_calls, LOUD_KEY, cell.address, http_address) as outcomes:
            beside, refused = await _ask(channel, seconds)
            state = await client.state()
            num_steps = await _count_steps(cell)
    name, before = f"{num_calls} {kind}", statistics.median(alone)
    worst = max(beside, default=0.0) - before
    middle = (statistics.median(beside) if beside else 0.0) - before
    return [
        Row(f"{name}: in the cell", state.num_running + state.num_waiting, "choices"),
        Row(f"{name}: quiet calls", len(beside), "calls"),
        limit(f"{name}: quiet calls refused", sum(refused.values()), "calls", at_most=0),
        Row(f"{name}: accepted later, median", middle, "s"),
        limit(f"{name}: accepted later, at most", worst, "s", at_most=MAX_DELAY_S),
        limit(f"{name}: steps to the first token", num_steps, "steps", at_most=MAX_STEPS),
        limit(f"{name}: links lost", _count_lost_links(cell) - num_lost, "links", at_most=0),
        *(Row(f"{name}: of the flood, {outcome}", count, "calls") for outcome, count in sorted(outcomes.items())),
    ]


async def _ask(channel: grpc.aio.Channel, seconds: float) -> tuple[list[float], Mapping[str, int]]:
    """Ask one call after the other; the seconds until each was accepted, and how many were refused, by status."""
    ends_at = time.monotonic() + seconds
    stub: Any = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
    times_s, refused = list[float](), dict[str, int]()
    for number in itertools.count():
        if time.monotonic() >= ends_at and (times_s or refused):
            break
        request = token_request([7 + number % 50, 8, 9], max_tokens=1, ignore_eos=True)
        began_at = time.monotonic()
        call = stub.Generate(request, metadata=(("authorization", f"Bearer {QUIET_KEY}"),), timeout=PATIENCE_S)
        try:
            await call.read()
            accepted_s = time.monotonic() - began_at
            while await call.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            refused[error.code().name] = refused.get(error.code().name, 0) + 1
        else:
            times_s.append(accepted_s)
        await asyncio.sleep(_PAUSE_S)
    return times_s, refused


async def _count_steps(cell: Cell) -> int:
    """The most steps until a first token of the quiet tenant; a third tenant's tokens show the steps."""
    counts = list[int]()
    async with open_tenant_replica(cell.cell_address) as replica:
        while len(counts) < _NUM_COUNTS:
            await replica.submit(WITNESS, num_requests=1, max_tokens=LONG)
            while not (await replica.read()).num_tokens[WITNESS.name]:
                pass
            while len(counts) < _NUM_COUNTS and (count := await replica.count_steps(QUIET, beside=WITNESS)) is not None:
                counts.append(count)
    return max(counts)


def _count_lost_links(cell: Cell) -> int:
    return sum(cell.log().count(text) for text in LOST_LINKS)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path, help="a model directory")
    parser.add_argument("--floods", nargs="+", choices=KINDS, default=KINDS, help="which floods (default: all)")
    parser.add_argument("--share", type=float, default=1.0, help="of the calls of each flood (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each flood (default: %(default)s)")
    parser.add_argument("--slots", type=int, default=64, help="sequences that run at once (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
