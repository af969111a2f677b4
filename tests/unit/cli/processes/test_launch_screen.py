"""What a person sees while a cell starts: a line per role, below them a bar or what is still waited for."""

from __future__ import annotations

import json

import pytest

from services.cli.processes.launch_screen import LaunchScreen, describe_model, describe_room

FACTS = "weights=int8 dtype=bfloat16 backend=native instructions=avx512 libraries=torch-2.9.1 threads=8 seconds=0.4"


class Screen:
    """A screen of two workers, a scheduler and a tokenizer, and what it has shown."""

    def __init__(self) -> None:
        self.now = 100.0
        self.lines: list[str] = []
        self.status: list[str] = []
        names = ["worker 0.0", "worker 1.0", "scheduler", "tokenizer"]
        self.screen = LaunchScreen(self._write, self.status.append, names, clock=lambda: self.now)

    def _write(self, data: bytes) -> None:
        self.lines += data.decode().replace("\r", "").splitlines()


def loading(percent: int) -> bytes:
    return f"12:00:01 INFO worker: loading weights percent={percent}".encode()


def test_each_role_has_a_line_once_all_its_processes_serve() -> None:
    shown = Screen()
    for name, at in (("scheduler", 101.0), ("worker 0.0", 102.0), ("worker 1.0", 104.5), ("tokenizer", 105.0)):
        shown.now = at
        shown.screen.on_ready(name)

    assert shown.lines == [
        "  scheduler  ready after 1.0 s",
        "  2 workers  ready after 4.5 s",
        "  tokenizer  ready after 5.0 s",
    ]
    assert shown.status[-1] == ""


def test_below_the_lines_is_what_is_waited_for_and_for_how_long() -> None:
    shown = Screen()
    shown.screen.on_ready("scheduler")
    shown.now += 7.0
    shown.screen.tick()
    assert shown.status[-1] == "/ waiting for the worker and the tokenizer, 7 s"


def test_while_weights_are_loaded_it_is_one_bar() -> None:
    shown = Screen()
    assert not shown.screen.take("worker 0.0", loading(80)), "the log lacks the line"
    shown.screen.take("worker 1.0", loading(30))
    assert shown.status[-1].startswith("| loading weights [############")
    assert shown.status[-1].endswith(" 30 %, 0 s")
    shown.screen.take("worker 1.0", loading(100))
    shown.screen.take("worker 0.0", loading(100))
    assert shown.status[-1] == "| waiting for the worker and the scheduler and the tokenizer, 0 s"


def test_nothing_is_shown_below_the_final_lines() -> None:
    shown = Screen()
    shown.screen.take("worker 0.0", loading(80))
    shown.screen.end()
    shown.screen.tick()
    assert shown.status[-2:] == ["", ""]


def test_an_exit_and_the_next_start_have_a_line_each() -> None:
    shown = Screen()
    for name in ("worker 0.0", "worker 1.0", "scheduler", "tokenizer"):
        shown.screen.on_ready(name)
    del shown.lines[:]
    shown.screen.on_exit("worker 1.0", "the worker 1.0 was killed by SIGKILL", 0.0)
    shown.screen.on_ready("worker 1.0")
    shown.screen.on_exit("scheduler", None, 0.5)
    # It ends the cell, whose last line says why.
    shown.screen.on_exit("tokenizer", "the tokenizer exited with code 1", None)
    assert shown.lines == [
        "the worker 1.0 was killed by SIGKILL; it restarts",
        "the worker 1.0 is ready again",
        "the scheduler ended; it restarts in 0.5 s",
    ]


def test_a_restarted_workers_bar_counts_from_its_exit() -> None:
    shown = Screen()
    for name in ("worker 0.0", "worker 1.0", "scheduler", "tokenizer"):
        shown.screen.on_ready(name)
    shown.now += 3600.0
    shown.screen.on_exit("worker 1.0", "the worker 1.0 was killed by SIGKILL", 0.0)
    shown.now += 4.0
    shown.screen.take("worker 1.0", loading(40))
    assert shown.status[-1].endswith(" 40 %, 4 s")


@pytest.mark.parametrize(
    "line",
    [
        f"12:00:01 INFO worker: the model is loaded {FACTS}".encode(),
        json.dumps({"message": "the model is loaded", **dict(each.split("=") for each in FACTS.split())}).encode(),
    ],
)
def test_the_formats_are_those_of_the_workers_line(line: bytes) -> None:
    shown = Screen()
    assert describe_model("tiny", shown.screen.model_facts) == ["serving tiny"]
    shown.screen.take("worker 0.0", line)
    assert describe_model("tiny", shown.screen.model_facts) == [
        "serving tiny: weights int8, computing in bfloat16, native kernels on avx512, 8 threads"
    ]


def less_room(num_tokens: int) -> str:
    fields = f"request_tokens={num_tokens} context_length=131072 whole_context=--kv-cache-memory-gib 3"
    return f"12:00:01 INFO worker: the KV cache holds less than the context {fields}"


def test_how_much_of_the_context_a_request_gets_has_a_line() -> None:
    shown = Screen()
    assert describe_room(shown.screen.room_facts) == []
    for num_tokens in (43680, 9000, 50000):
        shown.screen.take("worker 0.0", less_room(num_tokens).encode())
    assert describe_room(shown.screen.room_facts) == [
        "  context    a request gets 9000 of 131072 tokens; all with --worker.kv-cache-memory-gib 3"
    ]
    shown = Screen()
    record = {"message": "the KV cache holds less than the context", "request_tokens": 8, "context_length": 9}
    shown.screen.take("worker", json.dumps({**record, "whole_context": "--kv-cache-num-blocks 1"}).encode())
    [line] = describe_room(shown.screen.room_facts)
    assert line.endswith("a request gets 8 of 9 tokens; all with --worker.kv-cache-num-blocks 1")


def test_what_would_be_faster_has_a_line() -> None:
    shown = Screen()
    text = f"12:00:01 INFO worker: the model is loaded {FACTS} faster=a GPU: torch is built for CPUs alone"
    shown.screen.take("worker 0.0", text.encode())
    assert describe_model("tiny", shown.screen.model_facts)[1:] == ["  faster     a GPU: torch is built for CPUs alone"]
