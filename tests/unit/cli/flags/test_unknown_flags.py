"""Of a flag that is not known every command says one line, with the names that are nearest, and no usage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.commands import COMMANDS
from services.cli.flags.completion import commands
from services.worker.weights import importer
from shared.flag_parser import explain_unknown, find_like

# Each command with its required arguments, a flag with a slip, and the flag that is meant.
SLIPS = {
    "serve": (["m"], "--max-modl-len=8", "--max-model-len"),
    "ranks": (["m"], "--node-rnk=1", "--node-rank"),
    "chat": ([], "--sytem=x", "--system"),
    "generate": (["x"], "--max-tokenz=3", "--max-tokens"),
    "rerank": (["q", "d"], "--instructions=x", "--instruction"),
    "embed": (["x"], "--dimensons=3", "--dimensions"),
    "top": ([], "--intervall=3", "--interval"),
    "pull": (["a/b"], "--without-weight-files", "--without-weights"),
    "import": (["a", "b"], "--dequantise", "--dequantize"),
    "cache": (["ls"], "--paked-dir=x", "--packed-dir"),
    "config": (["m"], "--http-lissen=x", "--http-listen"),
}


def said_by(command: str, argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    # `lockstep import` goes on as the importer's process.
    main = importer.main if command == "import" else COMMANDS[command]
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "usage" not in line
    return line


@pytest.mark.parametrize("command", SLIPS)
def test_a_slip_is_answered_by_the_flag_that_is_meant(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, slip, meant = SLIPS[command]
    line = said_by(command, [*arguments, slip], capsys)
    assert line.startswith(f"error: unrecognized arguments: {slip}; did you mean ")
    assert meant in line
    assert f"`lockstep {'serve' if command == 'config' else command} --help` lists the flags" in line


@pytest.mark.parametrize("command", SLIPS)
def test_what_is_like_no_flag_is_told_in_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = said_by(command, [*SLIPS[command][0], "--zzz-qqq"], capsys)
    assert line.startswith("error: unrecognized arguments: --zzz-qqq; `lockstep ")


def test_every_command_with_flags_is_tried() -> None:
    assert SLIPS.keys() | {"completion"} == commands().keys() == COMMANDS.keys()


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("--num-threads", ["--worker.num-threads"]),
        ("--queue_policy=fcfs", ["--scheduler.queue-policy"]),
        # Two services have it.
        ("--drain-s", ["--scheduler.drain-s", "--tokenizer.drain-s"]),
        ("-tp", []),
    ],
)
def test_a_role_may_be_left_out(typed: str, found: list[str]) -> None:
    flags = ["--worker.num-threads", "--scheduler.queue-policy", "--scheduler.drain-s", "--tokenizer.drain-s"]
    assert find_like(typed, flags) == found


@given(st.lists(st.text(max_size=12), min_size=1, max_size=4))
def test_anything_may_be_typed(words: list[str]) -> None:
    assert explain_unknown(words, ["--tp", "--worker.dtype"]).startswith("unrecognized arguments: ")
