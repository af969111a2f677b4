"""What the `lockstep` command does before anything runs: its arguments, and how it reports failures."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from lockstep.v1 import common_pb2, tokenizer_pb2
from services.cli.clients.client import describe_failure, describe_finish, describe_logprobs, note_recovery, run_client
from services.cli.clients.request_flags import add_client_flags, request_from
from services.cli.commands import COMMANDS, USAGE, run
from services.cli.serve_settings import split_service_flags
from services.cli.tls_flags import peer_of_client
from shared.errors import NotReadyError
from shared.network.statuses import STATUS_DETAILS_KEY, to_status
from shared.network.tls import Role
from tests.support.system.processes import ROOT


def parse_request(*args: str) -> tokenizer_pb2.GenerateRequest:
    parser = argparse.ArgumentParser()
    add_client_flags(parser)
    return request_from(parser.parse_args(args))


def make_rpc_error(code: grpc.StatusCode, message: str, trailing: grpc.aio.Metadata) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=message)


def test_a_services_flags_are_passed_on_unparsed() -> None:
    own, role_to_flags = split_service_flags(
        ["MODEL", "--worker.a=1", "--listen", "x:1", "--scheduler.b", "2", "--tokenizer.c", "--log-level=info"]
    )

    assert own == ["MODEL", "--listen", "x:1", "--log-level=info"]
    assert role_to_flags == {"worker": ["--a=1"], "scheduler": ["--b", "2"], "tokenizer": ["--c"]}


def test_flags_after_a_service_flag_with_a_value_belong_to_the_launcher() -> None:
    assert split_service_flags(["--worker.a=1", "MODEL"])[0] == ["MODEL"]
    assert split_service_flags(["--worker.a", "1", "MODEL"])[0] == ["MODEL"]


@pytest.mark.parametrize(
    "flag",
    [
        "--worker.listen",
        "--scheduler.workers=unix:x",
        "--worker.dp-rank=1",
        "--tokenizer.model-dir=y",
        "--tokenizer.tls-cert=x",
        "--tokenizer.client-ca=x",
    ],
)
def test_a_flag_that_the_launcher_sets_is_refused_by_name(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        split_service_flags(["MODEL", flag])

    assert caught.value.code == 2
    assert capsys.readouterr().err == f"error: {flag.partition('=')[0]} is set by lockstep serve\n"


def test_the_scheduler_may_have_a_certificate_of_its_own() -> None:
    assert split_service_flags(["MODEL", "--scheduler.tls-cert=x"])[1]["scheduler"] == ["--tls-cert=x"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tls-cert=x"], "--tls-cert and --tls-key must be used together"),
        (["--tls-cert=x", "--tls-key=x"], "--tls-cert needs --tls-ca"),
        (["--trust-domain=x"], "--trust-domain needs --tls-ca"),
        (["--tls-ca=/none"], "--tls-ca /none: No such file or directory"),
    ],
)
def test_the_tls_flags_of_a_client_that_cannot_be_used_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    add_client_flags(parser)
    with pytest.raises(SystemExit) as caught:
        peer_of_client(parser, parser.parse_args(flags), Role.TOKENIZER)
    assert (caught.value.code, message in capsys.readouterr().err) == (2, True)


def test_absent_sampling_flags_stay_absent_and_zeros_are_sent() -> None:
    assert parse_request().sampling == common_pb2.SamplingParams()
    sampling = parse_request("--temperature=0", "--top-k=0", "--seed=0").sampling
    assert sampling.HasField("temperature")
    assert sampling.HasField("top_k")
    assert sampling.HasField("seed")
    assert not sampling.HasField("max_tokens")


def test_priority_and_cache_salt_are_sent_when_given() -> None:
    assert parse_request() == tokenizer_pb2.GenerateRequest(sampling=common_pb2.SamplingParams())
    request = parse_request("--priority=low", "--cache-salt=mine")
    assert (request.priority, request.cache_salt) == (common_pb2.PRIORITY_LOW, "mine")


@pytest.mark.parametrize("name", ["exact", "ordinary"])
def test_determinism_is_sent_when_given(name: str) -> None:
    request = parse_request(f"--determinism={name}")
    assert common_pb2.Determinism.Name(request.determinism) == f"DETERMINISM_{name.upper()}"


@pytest.mark.parametrize(
    ("recovery", "note"),
    [
        (None, ""),
        (common_pb2.Recovery(resume_count=1), "resumed once after a failure; the answer may not be"),
        (common_pb2.Recovery(resume_count=3, resume_exact=True), "resumed 3 times after a failure; the answer is"),
    ],
)
def test_a_resumed_answer_gets_a_note_on_stderr(
    recovery: common_pb2.Recovery | None, note: str, capsys: pytest.CaptureFixture[str]
) -> None:
    note_recovery(tokenizer_pb2.Finish(recovery=recovery))
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == (f"note: {note} what it would have been\n" if note else "")


def test_every_option_has_a_flag(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}', encoding="utf-8")
    request = parse_request(
        "--min-p=0.25",
        "--repetition-penalty=1.5",
        "--presence-penalty=-1",
        "--frequency-penalty=0.5",
        "--logit-bias=7=2",
        "--logit-bias=3=-100",
        "--bad-word=one",
        "--bad-word=two",
        "--min-tokens=2",
        "--stop-token-id=4",
        "--ignore-eos",
        "--include-stop",
        f"--json-schema={schema}",
    )
    sampling = common_pb2.SamplingParams(
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=0.5,
        logit_bias={7: 2.0, 3: -100.0},
        min_tokens=2,
        stop_token_ids=[4],
        ignore_eos=True,
    )
    assert request == tokenizer_pb2.GenerateRequest(
        sampling=sampling,
        bad_words=["one", "two"],
        include_stop=True,
        structured_output=tokenizer_pb2.StructuredOutput(json_schema='{"type": "object"}'),
    )


@pytest.mark.parametrize("flags", [["--logit-bias=7"], ["--json-schema=/nowhere"], ["--regex=a", "--grammar=/nowhere"]])
def test_an_invalid_flag_is_named(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_request(*flags)

    assert flags[-1].partition("=")[0] in capsys.readouterr().err


def test_log_probabilities_are_printed_token_by_token() -> None:
    own, other = [common_pb2.TokenLogprob(logprob=value, text=text) for value, text in ((-0.25, " a"), (-12.5, "\n"))]
    text = describe_logprobs([common_pb2.PositionLogprobs(token=own, top=[own, other])] * 2)
    assert text.splitlines() == ["  -0.250 ' a'    -0.250 ' a'   -12.500 '\\n'"] * 2


@pytest.mark.parametrize(
    ("tpot_us", "pace"),
    [
        (None, ""),
        # The clock did not advance.
        (0, ""),
        (6500, ", then one every 6.5 ms, 153.8 tokens/s"),
        (2_500_000, ", then one every 2500.0 ms, 0.4 tokens/s"),
    ],
)
def test_an_answer_ends_with_its_length_and_its_pace(tpot_us: int | None, pace: str) -> None:
    finish = tokenizer_pb2.Finish(reason=common_pb2.FINISH_REASON_EOS, usage=common_pb2.Usage(num_completion_tokens=12))
    finish.ttft.FromMilliseconds(80)
    if tpot_us is not None:
        finish.mean_tpot.FromMicroseconds(tpot_us)
    assert describe_finish(finish) == f"[12 tokens, ended by eos; first after 80 ms{pace}]"


@pytest.mark.parametrize(
    "flag", ["--max-tokens=-1", "--top-k=4294967296", "--seed=18446744073709551616", "--seed=x", "--timeout=0"]
)
def test_a_number_that_no_message_can_carry_is_named(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_request(flag)

    assert flag.partition("=")[0] in capsys.readouterr().err


def test_a_failed_call_is_reported_as_status_reason_and_message(capsys: pytest.CaptureFixture[str]) -> None:
    status = to_status(NotReadyError("not yet"))
    trailing = grpc.aio.Metadata((STATUS_DETAILS_KEY, status.SerializeToString()))

    def body() -> None:
        raise make_rpc_error(grpc.StatusCode.UNAVAILABLE, "not yet", trailing)

    assert run_client(body) == 1
    assert capsys.readouterr().err == "error: UNAVAILABLE NOT_READY: not yet\n"


@pytest.mark.process
def test_a_reader_that_closes_the_pipe_ends_a_command_quietly() -> None:
    script = """from services.cli.clients.client import run_client
raise SystemExit(run_client(lambda: print('x' * 1_000_000)))"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(5) == "xxxxx"
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_a_failure_without_a_reason_shows_none() -> None:
    error = make_rpc_error(grpc.StatusCode.UNAVAILABLE, "connection refused", grpc.aio.Metadata())

    assert describe_failure(error) == "UNAVAILABLE: connection refused"


def test_no_command_shows_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    assert capsys.readouterr().err == USAGE


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["dance", "serve"], "unknown command 'dance'"),
        (["sevre", "MODEL"], "unknown command 'sevre'; did you mean `lockstep serve`?"),
        (["--target=x", "top"], "unknown flag '--target=x': a command comes first"),
    ],
)
def test_an_unknown_command_is_named(argv: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(argv) == 2
    assert capsys.readouterr().err == f"error: {problem}\n`lockstep --help` lists the commands\n"


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert re.fullmatch(r"lockstep \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    usage = capsys.readouterr().out
    assert [name for name in COMMANDS if f"\n  {name} " not in usage] == []
