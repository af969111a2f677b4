"""What mutual TLS costs on the step stream, in processor time.

    python -m tests.bench.tls --quick
    python -m tests.bench.tls --json tls.json

One process has both ends of an Execute stream over loopback: a decode step in which nothing changed goes to a servicer
that answers with one token a row. Measured is the processor time of the whole process per step, with TLS and without,
which take turns; the least of all repeats, since a disturbance never improves it.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import uvloop

from lockstep.internal.v1 import worker_pb2, worker_pb2_grpc
from shared.network.rpc import make_channel, make_peer, make_server
from shared.network.tls import Certificates, Role
from tests.bench.parts.report import Row, compare, report
from tests.support.cells.certificates import Authority, write_files
from tests.support.system.ports import free_port

# Rows of a step.
BATCH_SIZES = (1, 32, 512)


class Answers(worker_pb2_grpc.WorkerServiceServicer):
    """Answers each step with a column of zeros."""

    def __init__(self, num_rows: int) -> None:
        self._token_ids = bytes(4 * num_rows)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register with `server`."""
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)

    async def Execute(
        self, request_iterator: AsyncIterator[worker_pb2.StepRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.StepResult]:
        """Serve one stream."""
        async for step in request_iterator:
            yield worker_pb2.StepResult(epoch=step.epoch, step_id=step.step_id, token_ids=self._token_ids)


@contextlib.asynccontextmanager
async def _open_stream(num_rows: int, own: dict[Role, Certificates]) -> AsyncIterator[grpc.aio.StreamStreamCall]:
    """A stream with the certificates of both ends; without certificates, it has no TLS."""
    address = f"127.0.0.1:{free_port()}"
    server = make_server(address, [Answers(num_rows)], internal=True, certificates=own.get(Role.WORKER))
    await server.start()
    peer = make_peer(own.get(Role.SCHEDULER), Role.WORKER)
    async with make_channel(address, internal=True, peer=peer) as channel:
        call = worker_pb2_grpc.WorkerServiceStub(channel).Execute()
        await _run_steps(call, 10)
        yield call
        call.cancel()
    await server.stop(None)


async def _run_steps(call: grpc.aio.StreamStreamCall, num_steps: int) -> float:
    """The processor time per step, in microseconds."""
    started_at = time.process_time()
    for step_id in range(1, num_steps + 1):
        await call.write(worker_pb2.StepRequest(epoch=1, step_id=step_id, kind=worker_pb2.STEP_KIND_DECODE))
        assert (await call.read()).step_id == step_id
    return (time.process_time() - started_at) / num_steps * 1e6


async def _measure(num_rows: int, num_steps: int, num_repeats: int, own: dict[Role, Certificates]) -> Row:
    async with _open_stream(num_rows, {}) as plain, _open_stream(num_rows, own) as encrypted:
        pairs = [[await _run_steps(call, num_steps) for call in (plain, encrypted)] for _ in range(num_repeats)]
    reference, value = map(min, zip(*pairs, strict=True))
    return compare(f"mutual TLS, {num_rows} rows, both ends, per step", value, "us", reference=reference)


async def _run(args: argparse.Namespace) -> list[Row]:
    authority = Authority()
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as directory:
        own = {
            role: Certificates(write_files(Path(directory) / role.value, authority.issue_role(role), authority), role)
            for role in (Role.WORKER, Role.SCHEDULER)
        }
        num_steps, num_repeats = (20, 1) if args.quick else (args.num_steps, args.repeats)
        return [await _measure(num_rows, num_steps, num_repeats, own) for num_rows in BATCH_SIZES]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-steps", type=int, default=500, help="steps of a repeat (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=20, help="repeats of each kind (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a short run, whose figures mean nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows here")
    args = parser.parse_args(argv)
    report(uvloop.run(_run(args)), args.json)


if __name__ == "__main__":
    main()
