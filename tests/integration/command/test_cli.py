"""`lockstep generate` and `lockstep chat` against a running cell."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from lockstep.v1 import common_pb2, tokenizer_pb2
from services.cli.clients.turn_history import open_history
from tests.support.cells.cell import Cell, popen_lockstep
from tests.support.clients.client import chat_request, connect, text_request
from tests.support.system.ports import free_port
from tests.support.system.processes import module_command, module_environment
from tests.support.system.terminals import NUM_COLUMNS, read_until, terminal

GREEDY = "--temperature=0"
# An answer that is still there when it is given up or cancelled.
LONG = ("--max-tokens=2000", "--ignore-eos")
# Python otherwise makes UTF-8 of it.
ASCII_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

# The bracketed-paste sequences that the line editor sends when it starts and stops reading.
READS, READS_NO_MORE = "\x1b[?2004h", "\x1b[?2004l"


def run_client(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    with popen_lockstep(*args, stdin=subprocess.PIPE) as process:
        stdout, stderr = process.communicate(stdin)
    return subprocess.CompletedProcess(args, process.returncode, stdout, stderr)


def expected_text(cell: Cell, request: tokenizer_pb2.GenerateRequest) -> str:
    with cell.stub() as stub:
        return "".join(response.text for response in stub.Generate(request))


def test_generate_streams_what_the_service_answers(real_cell: Cell) -> None:
    prompt = "The capital of France is"

    result = run_client("generate", f"--target={real_cell.address}", GREEDY, "--max-tokens=16", prompt)

    assert result.returncode == 0, result.stderr
    assert result.stdout == expected_text(real_cell, text_request(prompt, max_tokens=16)) + "\n"
    assert result.stderr == ""


def test_generate_sends_every_flag(real_cell: Cell) -> None:
    prompt = "One, two, three,"
    flags = ["--temperature=0.7", "--top-p=0.9", "--top-k=40", "--seed=7", "--max-tokens=24", "--stop=, ", "--stop=z"]
    flags += ["--priority=high", "--cache-salt=mine", "--timeout=600"]
    sampling = common_pb2.SamplingParams(temperature=0.7, top_p=0.9, top_k=40, seed=7, max_tokens=24)
    request = tokenizer_pb2.GenerateRequest(text=prompt, sampling=sampling, stop=[", ", "z"])

    result = run_client("generate", f"--target={real_cell.address}", *flags, prompt)

    assert result.stdout == expected_text(real_cell, request) + "\n"


def test_chat_keeps_the_history_of_a_piped_conversation(real_cell: Cell) -> None:
    turns = ["My name is Ada.", "What is my name?"]
    first = expected_text(real_cell, chat_request(("user", turns[0]), max_tokens=24))
    second = expected_text(
        real_cell, chat_request(("user", turns[0]), ("assistant", first), ("user", turns[1]), max_tokens=24)
    )

    result = run_client(
        "chat", f"--target={real_cell.address}", GREEDY, "--max-tokens=24", stdin=f"{turns[0]}\n\n{turns[1]}\n"
    )

    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{first}\n{second}\n"


def test_a_refused_request_is_told_with_status_and_reason(real_cell: Cell) -> None:
    result = run_client("generate", f"--target={real_cell.address}", "--temperature=3", "hello")

    assert result.returncode == 1
    assert result.stderr.startswith("error: INVALID_ARGUMENT INVALID_REQUEST: sampling.temperature")


def test_an_answer_that_takes_too_long_is_given_up(real_cell: Cell) -> None:
    result = run_client("generate", f"--target={real_cell.address}", *LONG, "--timeout=0.5", "Once upon a time")

    assert result.returncode == 1
    assert result.stderr.startswith("error: DEADLINE_EXCEEDED")


def test_a_server_that_is_not_there_is_told() -> None:
    result = run_client("generate", f"--target=127.0.0.1:{free_port()}", "hello")

    assert result.returncode == 1
    assert result.stderr.startswith("error: UNAVAILABLE: ")


async def test_ctrl_c_cancels_the_call(real_cell: Cell) -> None:
    with popen_lockstep("generate", f"--target={real_cell.address}", *LONG, "Once upon a time") as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        process.communicate()

    assert process.returncode == 130
    async with connect(real_cell) as client:
        state = await client.wait_until_idle()
    assert state.num_running == 0


def test_ctrl_c_in_a_conversation_ends_the_answer_and_twice_it_leaves(
    real_cell: Cell, float32_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    # This terminal does not answer cursor position requests.
    monkeypatch.setenv("PROMPT_TOOLKIT_NO_CPR", "1")
    monkeypatch.setenv("TERM", "xterm")
    command = ("chat", f"--target={real_cell.address}", "--system=You tell stories.", *LONG)
    with (
        terminal() as (person, program),
        popen_lockstep(*command, stdin=program, stdout=program, stderr=program) as process,
    ):
        greeting = read_until(person, READS)
        assert f"{float32_model.name} on {real_cell.address}. /help lists the commands" in greeting
        os.write(person, b"/system\r")
        assert "You tell stories." in read_until(person, READS)
        # Alt-Enter, which sends Escape and Enter, inserts a line break.
        os.write(person, b"Tell me a\x1b\rvery long story.\r")
        read_until(person, READS_NO_MORE)
        os.read(person, 1)
        process.send_signal(signal.SIGINT)
        assert "Press Ctrl-C again to exit." in read_until(person, READS)
        os.write(person, b"caf\xe9\r")
        assert "error: the input is not UTF-8" in read_until(person, READS)
        os.write(person, b"/reset\r")
        read_until(person, READS)
        os.write(person, b"\x03")
        assert "Press Ctrl-C again to exit." in read_until(person, READS)
        os.write(person, b"\x03")

        assert process.wait() == 130
    history = open_history(tmp_path / ".local" / "state" / "lockstep" / "chat_history")
    assert list(history.load_history_strings()) == ["/reset", "Tell me a\nvery long story.", "/system"]


def test_in_a_terminal_an_answer_is_broken_between_words(
    real_cell: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PROMPT_TOOLKIT_NO_CPR", "1")
    monkeypatch.setenv("TERM", "xterm")
    question = "Tell me a story about a fox."
    expected = expected_text(real_cell, chat_request(("user", question), max_tokens=60))
    with (
        terminal() as (person, program),
        popen_lockstep(
            *("chat", f"--target={real_cell.address}", GREEDY, "--max-tokens=60"),
            stdin=program,
            stdout=program,
            stderr=program,
        ) as process,
    ):
        read_until(person, READS)
        os.write(person, f"{question}\r".encode())
        read_until(person, READS_NO_MORE)
        seen = read_until(person, READS)
        os.write(person, b"\x04")
        assert process.wait() == 0
    answer = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]|\r", "", seen.partition(READS)[0])
    assert answer.split()[: len(expected.split())] == expected.split()
    lines = answer.split("\n")
    assert max(map(len, lines)) <= NUM_COLUMNS
    assert len(expected) > NUM_COLUMNS


@pytest.mark.parametrize(
    ("args", "stdin", "encoding"),
    [
        (["generate", "caf\udce9"], b"", "utf-8:strict"),
        # Each reader of stdin, whatever it makes of such bytes.
        (["generate", "-"], b"caf\xe9\n", "utf-8:strict"),
        (["rerank", "caf\udce9", "a"], b"", "utf-8:strict"),
        (["rerank", "a", "caf\udce9"], b"", "utf-8:surrogateescape"),
        (["rerank", "a"], b"caf\xe9\n", "utf-8:strict"),
        (["rerank", "a"], b"caf\xe9\n", "utf-8:surrogateescape"),
        (["embed", "caf\udce9"], b"", "utf-8:strict"),
        (["embed"], b"caf\xe9\n", "utf-8:surrogateescape"),
        (["generate", "-"], b"caf\xe9\n", "utf-8:surrogateescape"),
        (["generate", "--stop=caf\udce9", "Hello"], b"", "utf-8:surrogateescape"),
        (["chat"], b"caf\xe9\n", "utf-8:strict"),
        (["chat"], b"caf\xe9\n", "utf-8:surrogateescape"),
        (["chat", "--system=caf\udce9"], b"Hello\n", "utf-8:strict"),
    ],
)
def test_what_is_no_text_is_refused_in_one_line(args: list[str], stdin: bytes, encoding: str) -> None:
    # Nothing listens there: the input is refused before any connection is made.
    command = module_command("services.cli", *args, f"--target=127.0.0.1:{free_port()}")
    environment = module_environment() | {"PYTHONIOENCODING": encoding}
    result = subprocess.run(command, input=stdin, env=environment, capture_output=True, check=False)

    assert result.returncode in {1, 2}
    assert b"Traceback" not in result.stderr
    last_line = result.stderr.splitlines()[-1]
    assert b"error: " in last_line
    assert b"not UTF-8" in last_line


@pytest.mark.parametrize(
    "args",
    [
        ["generate", f"--target=127.0.0.1:{free_port()}", "café"],
        ["chat", f"--target=127.0.0.1:{free_port()}", "--system=café"],
        ["serve", "café"],
        ["serve", "model", "--prompt=café"],
    ],
)
def test_a_locale_that_cannot_decode_the_arguments_is_told(args: list[str]) -> None:
    environment = module_environment() | ASCII_LOCALE
    command = module_command("services.cli", *args)
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    last_line = result.stderr.splitlines()[-1]
    assert re.search(r"error: .* not UTF-8; the locale's encoding is ascii: use one of UTF-8", last_line)


def test_what_the_encoding_of_stdout_lacks_is_escaped(real_cell: Cell) -> None:
    environment = module_environment() | {"PYTHONIOENCODING": "latin-1"}
    flags = (f"--target={real_cell.address}", GREEDY, "--max-tokens=1", "--echo")
    command = module_command("services.cli", "generate", *flags, "café 你好")
    result = subprocess.run(command, env=environment, capture_output=True, check=False)

    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout.startswith("café ".encode("latin-1") + b"\\u4f60\\u597d")


def test_a_prompt_may_come_from_stdin(real_cell: Cell) -> None:
    prompt = "The capital of\nFrance is"
    flags = (f"--target={real_cell.address}", GREEDY, "--max-tokens=8")

    result = run_client("generate", *flags, "-", stdin=f"{prompt}\n")

    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == expected_text(real_cell, text_request(prompt, max_tokens=8)) + "\n"


def test_a_scheduler_is_no_door_for_a_chat(real_cell: Cell) -> None:
    result = run_client("chat", f"--target={real_cell.scheduler_address}", stdin="hello\n")

    assert result.returncode == 1
    assert result.stderr.startswith(f"error: {real_cell.scheduler_address} is the scheduler's address for clients: ")
