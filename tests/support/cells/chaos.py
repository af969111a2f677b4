"""Requests kept in flight while services of their cell are killed, and the check of each answer."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import grpc

from lockstep.v1 import common_pb2, scheduler_pb2, tokenizer_pb2
from shared.network.statuses import reason_of, status_from_rpc_error
from tests.support.cells.cell import Cell, start_cell
from tests.support.clients.client import Answer, Client, Completion, connect, token_request
from tests.support.system.patience import PATIENCE_S

State = scheduler_pb2.GetStateResponse

# The least number of running sequences when a service is killed.
MIN_RUNNING = 10
# Never sampled for a request of a load, so that a failpoint on it hits only the intended request.
MAGIC_TOKEN = 500

# Many processes share few cores here, so a busy one may be silent for longer than in production.
_SILENCE_S = 6
# Longer than the silence timeouts, so that a hung process is killed only after its peers have dropped it.
HEALTH_KILL_S = 8
WORKER_FLAGS = ("--kv-cache-num-blocks=4096", f"--silence-s={_SILENCE_S}")
SCHEDULER_FLAGS = (f"--worker-silence-s={_SILENCE_S}",)
TOKENIZER_FLAGS = (f"--scheduler-silence-s={_SILENCE_S}",)
_STOP_STRINGS = ("an", "th", "o ", "e,", "ing", "..", "q", "zz")
_SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "ages": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["name", "ages"],
        "additionalProperties": False,
    }
)
RETRY_S = 0.2
_POLL_S = 0.02


@dataclass(frozen=True)
class ChoiceFacts:
    """The parts of a choice that must be equal in all answers to one request; cached tokens may differ."""

    token_ids: tuple[int, ...]
    text: str
    reason: str
    stop: tuple[int, str]
    num_tokens: tuple[int, int]
    logprobs: tuple[bytes, ...]
    prompt_logprobs: tuple[bytes, ...]


Facts = dict[tuple[int, int], ChoiceFacts]


@dataclass
class Damage:
    """Requests whose answers differ from those of an undisturbed run, by the kind of difference."""

    lost: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)

    def judge(self, number: int, facts: Facts, expected: Facts) -> None:
        """Compare the answer to request `number` with the expected one, and record any difference."""
        if facts.keys() != expected.keys():
            self.changed.append(f"request {number}: choices {sorted(facts)} instead of {sorted(expected)}")
            return
        for place, choice in facts.items():
            if choice == expected[place]:
                continue
            tokens, due = choice.token_ids, expected[place].token_ids
            is_short, is_long = _is_part_of(tokens, due), _is_part_of(due, tokens)
            kind = self.changed
            if is_short is not is_long:
                kind = self.missing if is_short else self.repeated
            kind.append(f"request {number}, choice {place[1]}: {choice} instead of {expected[place]}")


def mixed_requests(
    count: int, *, determinism: common_pb2.Determinism = common_pb2.DETERMINISM_EXACT
) -> list[tokenizer_pb2.GenerateRequest]:
    """Requests of every kind, each with its own seed: the same request gets the same answer on an exact backend."""
    return [_mixed_request(number, determinism) for number in range(count)]


def stateful_requests(count: int) -> list[tokenizer_pb2.GenerateRequest]:
    """Exact requests with state beyond their tokens (grammars, penalties, stop strings), each with its own seed."""
    return [_stateful_request(number) for number in range(count)]


def facts_of(answer: Answer) -> Facts:
    """The facts of each choice, by prompt and choice number."""
    return {place: _facts_of_choice(choice) for place, choice in answer.choices.items()}


@dataclass(frozen=True)
class Peace:
    """Requests and their answers in a run in which nothing is killed."""

    requests: Sequence[tokenizer_pb2.GenerateRequest]
    answers: Sequence[Facts]


class LostError(Exception):
    """A request has no complete answer."""


@dataclass(frozen=True)
class Told:
    """An answer's facts, and how often its choices were resumed."""

    facts: Facts
    num_resumes: int


class Asker(Protocol):
    """Sends requests to a cell."""

    async def ask(self, request: tokenizer_pb2.GenerateRequest, note_response: Callable[[], None]) -> Told:
        """Send a request and read its answer, noting each part of it; retries while the cell answers NOT_READY.

        Raises:
            LostError: The answer is an error, or not complete.
            AssertionError: The answer is not what an answer may be.
        """


class GrpcAsker:
    """Sends requests to the tokenizer service by gRPC; see `Asker`."""

    def __init__(self, client: Client, keys: Sequence[str] = ()) -> None:
        """Send a request with the key that its seed picks, if there are any."""
        self._client = client
        self._keys = keys

    async def ask(self, request: tokenizer_pb2.GenerateRequest, note_response: Callable[[], None]) -> Told:
        """See `Asker`."""
        key = self._keys[request.sampling.seed % len(self._keys)] if self._keys else None
        metadata = None if key is None else (("authorization", f"Bearer {key}"),)
        while True:
            answer = Answer()
            try:
                async for response in self._client.tokenizer.Generate(request, metadata=metadata):
                    note_response()
                    answer.add(response)
            except grpc.aio.AioRpcError as error:
                if answer.choices or reason_of(status_from_rpc_error(error)) != "NOT_READY":
                    raise LostError(f"{error.code()} {error.details()}") from error
                await asyncio.sleep(RETRY_S)
                continue
            answer.complete()
            return Told(facts_of(answer), sum(_num_resumes(choice) for choice in answer.choices.values()))


class Load:
    """Keeps requests in flight through the tokenizer, and checks their answers against an undisturbed run.

    Attributes:
        num_answers: Answers and errors so far.
        num_responses: Response messages so far.
        num_resumes: Resumes of choices in those answers.
        damage: The differences found.
    """

    def __init__(self, client: Client, peace: Peace, *, asker: Asker | None = None) -> None:
        """Send nothing yet; `asker` sends by gRPC if not given."""
        self.num_answers = 0
        self.num_responses = 0
        self.num_resumes = 0
        self.damage = Damage()
        self._client = client
        self._asker = asker or GrpcAsker(client)
        self._peace = peace
        self._numbers = itertools.cycle(range(len(peace.requests)))
        self._is_ending = False

    @asynccontextmanager
    async def keep_in_flight(self) -> AsyncIterator[None]:
        """Keep one task per request sending requests in turn; at the end wait for the last answers."""
        async with asyncio.TaskGroup() as group:
            for _ in self._peace.requests:
                group.create_task(self._ask_on())
            try:
                yield
            finally:
                self._is_ending = True

    async def wait_for_progress(self) -> None:
        """Wait until another response arrives; fails after five minutes."""
        before = self.num_responses
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if self.num_responses > before:
                    return
                await asyncio.sleep(_POLL_S)

    async def wait_until_busy(self, rank: int) -> None:
        """Wait until a DP rank runs at least `MIN_RUNNING` sequences."""
        await self.wait_for_state(lambda state: state.rank_steps[rank].num_running >= MIN_RUNNING)

    async def settle(self) -> None:
        """Wait until every rank is attached again and another response has arrived."""
        await self.wait_for_state(lambda state: all(rank.is_attached for rank in state.rank_steps))
        await self.wait_for_progress()

    async def wait_for_state(self, condition: Callable[[State], object]) -> State:
        """Wait until the scheduler's state meets a condition; fails after five minutes. Retries while it is down."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    state = await self._client.state()
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:
                        raise
                else:
                    if condition(state):
                        return state
                await asyncio.sleep(_POLL_S)

    def describe(self) -> str:
        """A summary: the number of answers, resumes and differences."""
        kinds = {name: len(requests) for name, requests in vars(self.damage).items()}
        wrong = ", ".join(f"{count} {name}" for name, count in kinds.items())
        return f"{self.num_answers} answers, {self.num_resumes} resumes; {wrong}"

    async def _ask_on(self) -> None:
        while not self._is_ending:
            number = next(self._numbers)
            try:
                told = await self._asker.ask(self._peace.requests[number], self._note_response)
            except LostError as error:
                self.damage.lost.append(f"request {number}: {error}")
            except AssertionError as error:
                self.damage.changed.append(f"request {number}: {error}")
            else:
                self.damage.judge(number, told.facts, self._peace.answers[number])
                self.num_resumes += told.num_resumes
            self.num_answers += 1

    def _note_response(self) -> None:
        self.num_responses += 1


# Reports the result of a load, given the number of deaths and the last scheduler's state.
TellOf = Callable[[Load, int, State], None]


class Killer:
    """Kills a cell's services under load, each while it is busy.

    Attributes:
        num_deaths: Services killed or stopped so far.
    """

    def __init__(self, cell: Cell, load: Load) -> None:
        self.num_deaths = 0
        self._cell = cell
        self._load = load
        self._random = random.Random(1)

    async def hit_a_worker(self, signal_number: int = signal.SIGKILL) -> None:
        """Kill or stop a random worker once its rank is busy, and wait until it is replaced."""
        name = self._random.choice(self._workers())
        rank = dp_rank_of(name)
        await self._load.wait_until_busy(rank)
        await self._hit(name, signal_number)

    async def hit_the_scheduler(self, signal_number: int = signal.SIGKILL) -> None:
        """Kill or stop the scheduler once it is busy, and wait until it is replaced."""
        await self._load.wait_for_state(lambda state: state.num_running >= MIN_RUNNING)
        await self._hit("scheduler", signal_number)

    async def hit_anything(self) -> None:
        """Kill a worker, stop a worker or kill the scheduler, in rotation."""
        match self.num_deaths % 3:
            case 0:
                await self.hit_a_worker()
            case 1:
                await self.hit_a_worker(signal.SIGSTOP)
            case 2:
                await self.hit_the_scheduler()

    async def hit_the_scheduler_and_a_worker(self) -> None:
        """Kill a worker of a busy rank together with the scheduler, and wait until both are replaced."""
        name = self._random.choice(self._workers())
        await self._load.wait_until_busy(dp_rank_of(name))
        await self._kill_together([name, "scheduler"])

    async def hit_the_scheduler_and_all_workers(self) -> None:
        """Kill all workers and the scheduler while they are busy, and wait until all are replaced."""
        await self._load.wait_for_state(lambda state: state.num_running >= MIN_RUNNING)
        await self._kill_together([*self._workers(), "scheduler"])

    def _workers(self) -> list[str]:
        return [name for name in self._cell.role_to_process if name.startswith("worker")]

    async def _kill_together(self, names: Sequence[str]) -> None:
        processes = self._cell.find_processes()
        for name in names:
            processes[name].kill()
        self.num_deaths += len(names)
        for name in names:
            await self._cell.wait_until_serving(name, instead_of=processes[name].pid)

    async def _hit(self, name: str, signal_number: int) -> None:
        pid = self._cell.send_signal(name, signal_number)
        self.num_deaths += 1
        await self._cell.wait_until_serving(name, instead_of=pid)


async def learn(
    model_dir: Path, requests: Sequence[tokenizer_pb2.GenerateRequest], *, backend: str = "reference"
) -> Peace:
    """Record the answer to each request in an undisturbed cell."""
    async with chaos_cell(model_dir, backend=backend) as (_, client):
        answers = await asyncio.gather(*map(client.generate_choices, requests))
    return Peace(requests, [facts_of(answer) for answer in answers])


@asynccontextmanager
async def chaos_cell(
    model_dir: Path, *flags: str, backend: str = "reference", has_workers: bool = True
) -> AsyncIterator[tuple[Cell, Client]]:
    """A cell with long silence timeouts and quick restarts.

    Args:
        has_workers: Whether it starts its workers itself; if not, the test must start them with `WORKER_FLAGS`.
    """
    role_to_flags: dict[str, Sequence[str]] = {"scheduler": SCHEDULER_FLAGS, "tokenizer": TOKENIZER_FLAGS}
    if has_workers:
        role_to_flags["worker"] = (*WORKER_FLAGS, f"--ops-backend={backend}")
    service_flags = [
        flag.replace("--", f"--{role}.", 1) for role, role_flags in role_to_flags.items() for flag in role_flags
    ]
    with ExitStack() as stack:
        # In a thread, since the path to its workers may run in this event loop.
        starting = start_cell(model_dir, *service_flags, "--max-restart-delay-s=1", *flags)
        cell = await asyncio.to_thread(stack.enter_context, starting)
        async with connect(cell) as client:
            yield cell, client


def dp_rank_of(worker_name: str) -> int:
    """The DP rank of `worker DP.TP`; a cell's only worker has rank 0."""
    _, _, rank = worker_name.partition(" ")
    return int(rank.partition(".")[0] or 0)


def _mixed_request(number: int, determinism: common_pb2.Determinism) -> tokenizer_pb2.GenerateRequest:
    prompt = [3 + (number * 31 + position * position) % 400 for position in range(2 + number % 30)]
    sampling: dict[str, Any] = {
        "max_tokens": 20 + 8 * (number % 5),
        "seed": number,
        "temperature": 1.0,
        "logit_bias": {MAGIC_TOKEN: -100.0},
    }
    fields: dict[str, Any] = {}
    match number % 8:
        case 0:
            sampling |= {"temperature": 0.0, "ignore_eos": True}
        case 1:
            sampling |= {"top_p": 0.9, "top_k": 50}
        case 2:
            sampling |= {"n": 3}
        case 3:
            fields |= {"stop": _STOP_STRINGS}
        case 4:
            sampling |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25}
        case 5:
            sampling |= {"num_logprobs": 3, "num_prompt_logprobs": 2, "temperature": 0.0}
        case 6:
            fields |= {"structured_output": tokenizer_pb2.StructuredOutput(regex="[a-z ]{20,60}")}
        case 7:
            sampling |= {"min_p": 0.02, "ignore_eos": True, "temperature": 1.5}
    request = token_request(prompt, **sampling)
    request.MergeFrom(tokenizer_pb2.GenerateRequest(determinism=determinism, **fields))
    return request


def _stateful_request(number: int) -> tokenizer_pb2.GenerateRequest:
    prompt = [3 + (number * 29 + position * position) % 400 for position in range(2 + number % 20)]
    sampling: dict[str, Any] = {"max_tokens": 60 + 10 * (number % 5), "seed": number, "temperature": 1.0}
    fields: dict[str, Any] = {}
    match number % 4:
        case 0:
            sampling |= {"n": 3}
            fields |= {"structured_output": tokenizer_pb2.StructuredOutput(json_schema=_SCHEMA)}
        case 1:
            fields |= {"stop": _STOP_STRINGS}
            sampling |= {"ignore_eos": True}
        case 2:
            sampling |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25}
            sampling |= {"ignore_eos": True}
        case 3:
            sampling |= {"num_logprobs": 3, "num_prompt_logprobs": 2, "ignore_eos": True}
    request = token_request(prompt, **sampling)
    exact = common_pb2.DETERMINISM_EXACT
    request.MergeFrom(tokenizer_pb2.GenerateRequest(determinism=exact, **fields))
    return request


def _facts_of_choice(choice: Completion) -> ChoiceFacts:
    assert choice.finish is not None
    usage = choice.finish.usage
    return ChoiceFacts(
        token_ids=tuple(choice.token_ids),
        text=choice.text,
        reason=choice.reason,
        stop=(choice.finish.stop_token_id, choice.finish.stop_string),
        num_tokens=(usage.num_prompt_tokens, usage.num_completion_tokens),
        logprobs=tuple(position.SerializeToString() for position in choice.logprobs),
        prompt_logprobs=tuple(position.SerializeToString() for position in choice.prompt_logprobs),
    )


def _num_resumes(choice: Completion) -> int:
    assert choice.finish is not None
    return int(choice.finish.recovery.resume_count)


def _is_part_of(part: Sequence[int], whole: Sequence[int]) -> bool:
    rest = iter(whole)
    return all(item in rest for item in part)
