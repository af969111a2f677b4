"""`lockstep top`: what a cell's scheduler is doing."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import sys
import time
from collections.abc import Iterator, Sequence

import grpc

from lockstep.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.cli.clients.client import run_client
from services.cli.clients.event_lines import event_lines
from services.cli.clients.running_cells import Target, explain_no_cell, find_target
from services.cli.clients.wrong_service import ADMIN, explain_wrong_service
from services.cli.tls_flags import add_certificate_flags, peer_of_operator
from shared.flag_parser import FlagParser
from shared.network.rpc import Peer, make_channel
from shared.network.tls import Role

DEFAULT_SCHEDULER = "127.0.0.1:50054"

_DEADLINE_S = 5.0
# The scheduler's process has gone, or does not run.
_NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_COUNTERS = (
    ("prompt tokens", "num_prefix_queried_tokens"),
    ("completion tokens", "num_completion_tokens"),
    ("prefill steps", "num_prefill_steps"),
    ("decode steps", "num_decode_steps"),
    ("preemptions", "num_preemptions"),
    ("requests finished", "num_finished"),
)
_NO_WORKER = "no worker is attached"
_NO_WORK = "no worker takes new requests: they drain, or try requests that may have crashed them"
_HOME = "\x1b[H"
_ERASE_LINE_END = "\x1b[K"
_ERASE_BELOW = "\x1b[J"


def make_parser() -> FlagParser:
    """The command's flags."""
    parser = FlagParser(
        prog="lockstep top", description="Show a cell's queue, KV blocks and steps, refreshed until Ctrl-C."
    )
    parser.add_argument(
        "--target",
        metavar="ADDRESS",
        help="the scheduler's --cell-listen (default: that of the cell running on this machine, else "
        f"{DEFAULT_SCHEDULER})",
    )
    parser.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="SECONDS", help="refresh interval (default: %(default)g)"
    )
    parser.add_argument("--once", action="store_true", help="print one snapshot and exit")
    add_certificate_flags(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)
    peer = peer_of_operator(parser, args, Role.SCHEDULER)
    num_snapshots = 1 if args.once else None
    target = find_target(args.target, lambda cell: cell.cell_address, DEFAULT_SCHEDULER)
    return run_client(lambda: asyncio.run(_show(target, peer, args.interval, num_snapshots)))


def render(
    target: str,
    state: scheduler_pb2.GetStateResponse,
    before: scheduler_pb2.GetStateResponse | None = None,
    elapsed_s: float = 1.0,
    *,
    model: str = "",
) -> str:
    """A snapshot as text.

    Args:
        before: An earlier state; None, or one of another scheduler process, leaves its column empty.
        elapsed_s: Between the two, above 0.
        model: The model's name; empty if it is not known.
    """
    verdict = _NO_WORKER
    if state.ready:
        verdict = "ready" if state.takes_work or not state.HasField("takes_work") else _NO_WORK
    return _text([*_heading(target, model, verdict), *_body(state, before, elapsed_s)])


def render_silence(
    target: str, last: scheduler_pb2.GetStateResponse | None, silent_s: float, *, model: str = ""
) -> str:
    """What is shown while no scheduler answers.

    Args:
        last: What one has answered last, `silent_s` ago.
    """
    verdict = f"has not answered for {silent_s:.0f} s; trying again"
    body = [] if last is None else ["", "before that:", *_body(last, None, 1.0)]
    return _text([*_heading(target, model, verdict), *body])


def _heading(target: str, model: str, verdict: str) -> list[str]:
    return [f"scheduler {target}: {verdict}", *([f"model     {model}"] if model else [])]


def _text(lines: Sequence[str]) -> str:
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _body(
    state: scheduler_pb2.GetStateResponse, before: scheduler_pb2.GetStateResponse | None, elapsed_s: float
) -> list[str]:
    if before is not None and before.instance_id != state.instance_id:
        before = None
    usage = state.num_used_blocks / state.num_blocks if state.num_blocks else 0.0
    lines = [
        "",
        _line("requests waiting", state.num_waiting),
        _line("requests running", state.num_running),
        _line("KV blocks used", state.num_used_blocks, f"{usage:.1%} of {state.num_blocks}"),
        _line("KV blocks cached", state.num_cached_blocks),
        _line("KV blocks free", state.num_free_blocks, "including cached ones"),
        *_state_lines(state),
        *_context_lines(state),
        "",
        _line("", "since start", "" if before is None else f"last {elapsed_s:.1f} s"),
        *(_counter_line(label, name, state, before, elapsed_s) for label, name in _COUNTERS),
        _line("prefix hit rate", _hit_rate(state), "" if before is None else _hit_rate(state, before)),
        _line("drafts accepted", _acceptance_rate(state), "" if before is None else _acceptance_rate(state, before)),
        _line("resumes", state.num_recoveries, f"of {state.num_lost_epochs} losses of workers"),
    ]
    if state.rank_steps:
        lines += ["", *_rank_lines(state, before, elapsed_s)]
    return [*lines, *event_lines(state)]


def _state_lines(state: scheduler_pb2.GetStateResponse) -> list[str]:
    """Only where the model has recurrent states that can be saved."""
    if not state.num_checkpoints:
        return []
    usage = state.num_used_checkpoints / state.num_checkpoints
    return [_line("states saved", state.num_used_checkpoints, f"{usage:.1%} of {state.num_checkpoints}")]


def _context_lines(state: scheduler_pb2.GetStateResponse) -> list[str]:
    """The context, and what the KV pool leaves of it to a request; nothing before a worker has been attached."""
    if not state.context_length:
        return []
    is_less = state.num_pool_tokens < state.context_length
    return [_line("context", state.context_length, f"{state.num_pool_tokens} fit the KV pool" if is_less else "")]


class _Scheduler:
    """The scheduler at an address, where another process may take the place of one that has died."""

    def __init__(self, target: Target, peer: Peer | None) -> None:
        self._target = target
        self._peer = peer
        self._channel = make_channel(target.address, peer=peer)
        self._has_answered = False

    async def ask(self) -> scheduler_pb2.GetStateResponse | None:
        """Its state; None if one has answered before, and none does now.

        Raises:
            grpc.aio.AioRpcError: the call failed for another reason.
            NoCellError: nothing answers, and nothing has.
            WrongServiceError: another service answers.
        """
        try:
            async with explain_wrong_service(self._channel, self._target.address, ADMIN):
                stub = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)
                state: scheduler_pb2.GetStateResponse = await stub.GetState(
                    scheduler_pb2.GetStateRequest(), timeout=_DEADLINE_S
                )
        except grpc.aio.AioRpcError as error:
            if error.code() not in _NO_ANSWER:
                raise
            if not self._has_answered:
                async with explain_no_cell(self._target):
                    raise
            # A new channel connects at once, and has the certificates of the day.
            await self.close()
            self._channel = make_channel(self._target.address, peer=self._peer)
            return None
        self._has_answered = True
        return state

    async def close(self) -> None:
        await self._channel.close()


async def _show(target: Target, peer: Peer | None, interval_s: float, num_snapshots: int | None) -> None:
    """Until cancelled if `num_snapshots` is None."""
    is_terminal = sys.stdout.isatty() and num_snapshots is None
    scheduler = _Scheduler(target, peer)
    before: scheduler_pb2.GetStateResponse | None = None
    before_at = 0.0
    try:
        for number in itertools.count(1):
            state, now = await scheduler.ask(), time.monotonic()
            if state is not None:
                text = render(target.address, state, before, now - before_at, model=target.model)
                before, before_at = state, now
            else:
                text = render_silence(target.address, before, now - before_at, model=target.model)
            if is_terminal:
                text = _repaint(text, is_first=number == 1)
            elif number > 1:
                text = f"\n{text}"
            sys.stdout.write(text)
            sys.stdout.flush()
            if number == num_snapshots:
                return
            await asyncio.sleep(interval_s)
    finally:
        await scheduler.close()


def _repaint(text: str, *, is_first: bool) -> str:
    """Draw over the previous text. Erasing only what is left over avoids flicker."""
    clear = _HOME + _ERASE_BELOW if is_first else _HOME
    return clear + text.replace("\n", f"{_ERASE_LINE_END}\n") + _ERASE_BELOW


def _counter_line(
    label: str,
    name: str,
    state: scheduler_pb2.GetStateResponse,
    before: scheduler_pb2.GetStateResponse | None,
    elapsed_s: float,
) -> str:
    count = getattr(state, name)
    rate = "" if before is None else f"{(count - getattr(before, name)) / elapsed_s:.1f}/s"
    return _line(label, count, rate)


def _rank_lines(
    state: scheduler_pb2.GetStateResponse, before: scheduler_pb2.GetStateResponse | None, elapsed_s: float
) -> Iterator[str]:
    heading = f"{'rank':<6}{'attached':>9}{'waiting':>9}{'running':>9}{'KV used':>9}"
    yield f"{heading}{'steps':>12}{'dummies':>9}{'steps/s':>10}"
    num_steps_before = {rank.dp_rank: _num_steps(rank) for rank in before.rank_steps} if before is not None else {}
    for rank in state.rank_steps:
        usage = rank.num_used_blocks / rank.num_blocks if rank.num_blocks else 0.0
        num_steps = _num_steps(rank)
        # A rank that was not there before has no rate yet.
        earlier = num_steps_before.get(rank.dp_rank)
        rate = "" if earlier is None else f"{(num_steps - earlier) / elapsed_s:.1f}"
        dummies = f"{rank.num_dummy_steps / num_steps:.1%}" if num_steps else "-"
        yield (
            f"{rank.dp_rank:<6}{_attachment(rank):>9}{rank.num_waiting:>9}{rank.num_running:>9}"
            f"{usage:>9.1%}{num_steps:>12}{dummies:>9}{rate:>10}"
        )


def _attachment(rank: scheduler_pb2.RankSteps) -> str:
    if not rank.is_attached:
        return "no"
    return "draining" if rank.is_draining else "yes"


def _num_steps(rank: scheduler_pb2.RankSteps) -> int:
    return rank.num_prefill_steps + rank.num_decode_steps + rank.num_mixed_steps + rank.num_dummy_steps


def _hit_rate(state: scheduler_pb2.GetStateResponse, before: scheduler_pb2.GetStateResponse | None = None) -> str:
    """Share of prompt tokens found in the prefix cache, since `before` or the start; `-` without any."""
    return _share(state, before, part="num_prefix_hit_tokens", whole="num_prefix_queried_tokens")


def _acceptance_rate(
    state: scheduler_pb2.GetStateResponse, before: scheduler_pb2.GetStateResponse | None = None
) -> str:
    """As `_hit_rate`, for draft tokens that were accepted."""
    return _share(state, before, part="num_accepted_draft_tokens", whole="num_draft_tokens")


def _share(
    state: scheduler_pb2.GetStateResponse, before: scheduler_pb2.GetStateResponse | None, *, part: str, whole: str
) -> str:
    before = before or scheduler_pb2.GetStateResponse()
    num_whole = getattr(state, whole) - getattr(before, whole)
    num_part = getattr(state, part) - getattr(before, part)
    return f"{num_part / num_whole:.1%}" if num_whole else "-"


def _line(label: str, value: object, note: str = "") -> str:
    return f"{label:<18}{value!s:>12}   {note}"


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.1 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds, at least 0.1")
    return value
