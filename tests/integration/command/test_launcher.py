"""`lockstep serve` as a user or a script sees it: start, stop and error messages."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest

from lockstep.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc
from shared.network.health import Health
from shared.network.rpc import make_channel, make_server
from shared.network.statuses import reason_of, status_from_rpc_error
from shared.network.tls import Role
from tests.support.cells.cell import Cell, popen_lockstep, run_serve, start_cell
from tests.support.cells.certificates import Authority, write_files
from tests.support.cells.tls_cell import tls_flags
from tests.support.clients.client import text_request
from tests.support.models.tiny_llama import write_tiny_llama
from tests.support.system.patience import PATIENCE_S
from tests.support.system.pipes import full_pipe
from tests.support.system.ports import free_port
from tests.support.system.processes import module_environment, python_command, start_service
from tests.support.system.serving import wait_until_serving

ROLES = ("worker", "scheduler", "tokenizer")
IDLE_S = 10.0
# The command, for which no file can have more bytes than its first argument says.
WITH_FULL_DISKS = """
import resource, sys
num_bytes = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))
from services.cli.main import main
main()
"""
POLL_S = 0.1


def free_address() -> str:
    return f"--listen=127.0.0.1:{free_port()}"


def assert_nothing_is_left(cell: Cell, runtime_dir: Path) -> None:
    assert not [p for p in cell.role_to_process.values() if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not runtime_dir.exists()


def assert_stopped_in_order(cell: Cell, *roles: str) -> None:
    stopped = re.findall(r"serve: stopped role=(\w+) pid=(\d+)", cell.log())
    assert stopped == [(role, str(cell.role_to_process[role].pid)) for role in roles]


def begin_answer(cell: Cell, stack: ExitStack, *, max_tokens: int) -> Iterator[tokenizer_pb2.GenerateResponse]:
    """Begin an answer of `max_tokens`, and read its first token."""
    stub = stack.enter_context(cell.stub())
    call = stub.Generate(text_request("Hello", max_tokens=max_tokens, ignore_eos=True))
    while not next(call).token_ids:
        pass
    answer: Iterator[tokenizer_pb2.GenerateResponse] = call
    return answer


def test_a_busy_cell_that_is_asked_to_stop_finishes_its_answers_then_stops_each_service(tiny_model: Path) -> None:
    with start_cell(tiny_model) as cell, ExitStack() as stack:
        runtime_dir = cell.runtime_dir
        assert runtime_dir.stat().st_mode & 0o777 == 0o700
        answer = begin_answer(cell, stack, max_tokens=200)
        cell.launcher.send_signal(signal.SIGTERM)
        *_, last = answer
        assert last.finish.reason == common_pb2.FINISH_REASON_MAX_TOKENS
        assert cell.wait() == 0

        assert_stopped_in_order(cell, "tokenizer", "scheduler", "worker")
        # The worker says what it computes in.
        loaded = r"the model is loaded weights=\S+ dtype=\w+ backend=\w+ .*threads=\d+ seconds="
        assert re.search(loaded, cell.log())
        assert_nothing_is_left(cell, runtime_dir)
        assert "Traceback" not in cell.log()


def test_a_second_signal_stops_a_busy_cell_at_once(tiny_model: Path) -> None:
    with start_cell(tiny_model, "--drain-s=3600") as cell, ExitStack() as stack:
        answer = begin_answer(cell, stack, max_tokens=400)
        # The answer does not end by itself.
        cell.send_signal("worker", signal.SIGSTOP)
        cell.launcher.send_signal(signal.SIGINT)
        cell.wait_for_log("draining num_requests=1")
        # Those within two seconds of the first belong to it.
        while "outcome=DRAINING" not in cell.log():
            cell.launcher.send_signal(signal.SIGINT)
            time.sleep(POLL_S)
        with pytest.raises(grpc.RpcError) as ended:
            list(answer)
        assert reason_of(status_from_rpc_error(ended.value)) == "DRAINING"
        cell.send_signal("worker", signal.SIGCONT)
        assert cell.wait() == 0
        assert "Traceback" not in cell.log()


def test_ctrl_c_in_a_terminal_reaches_the_launcher_alone(real_cell: Cell) -> None:
    launcher_session = os.getsid(real_cell.launcher.pid)
    sessions = {os.getsid(process.pid) for process in real_cell.role_to_process.values()}
    assert launcher_session not in sessions
    assert len(sessions) == len(ROLES)


@pytest.mark.parametrize("role", ["worker", *(pytest.param(role, marks=pytest.mark.slow) for role in ROLES[1:])])
def test_a_service_that_dies_before_the_cell_serves_is_named_and_ends_the_others(tiny_model: Path, role: str) -> None:
    with popen_lockstep("serve", str(tiny_model), free_address()) as launcher:
        assert launcher.stderr is not None
        while f"started role={role} pid=" not in (line := launcher.stderr.readline()):
            assert line, "the launcher ended before it had started the service"
        services = psutil.Process(launcher.pid).children()
        os.kill(int(line.rpartition("=")[2]), signal.SIGKILL)
        _, log = launcher.communicate()

    assert launcher.returncode == 1
    assert f"error: the {role} was killed by SIGKILL\n" in log
    assert not [service for service in services if service.is_running()]


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker that no launcher has started."""

    process: subprocess.Popen[bytes]
    address: str


@pytest.fixture(scope="module")
def worker(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Cells come and go; tests leave it running."""
    address = f"unix:{tmp_path_factory.mktemp('worker') / 'worker.sock'}"
    with start_service("worker", f"--model-dir={tiny_model}", f"--listen={address}") as process:
        yield Worker(process, address)


async def test_what_answers_on_a_port_that_was_taken_meanwhile_is_not_taken_for_the_cell(
    tiny_model: Path, worker: Worker
) -> None:
    address = f"127.0.0.1:{free_port()}"
    flags = (f"--listen={address}", f"--workers={worker.address}")
    health = Health(())
    await health.set_serving(True)
    with popen_lockstep("serve", str(tiny_model), *flags) as launcher:
        assert launcher.stdout is not None
        assert launcher.stderr is not None
        while "started role=tokenizer pid=" not in (line := launcher.stderr.readline()):
            assert line, "the launcher ended before it had started the tokenizer"
        tokenizer = psutil.Process(int(line.rpartition("=")[2]))
        tokenizer.suspend()
        stranger = make_server(address, [health])
        await stranger.start()
        # Now only the tokenizer itself is not ready.
        while "ready role=scheduler" not in (line := await asyncio.to_thread(launcher.stderr.readline)):
            assert line, "the launcher ended before the scheduler was ready"
        tokenizer.resume()
        ready_line = await asyncio.to_thread(launcher.stdout.readline)
        launcher.terminate()
        _, log = await asyncio.to_thread(launcher.communicate, None, PATIENCE_S)
        await stranger.stop(None)

    assert ready_line == ""
    assert launcher.returncode == 1
    assert log.splitlines()[-1].startswith("error: the tokenizer exited with code 1: cannot serve")


def refused(*args: str) -> str:
    """Run `lockstep serve` with arguments that it must refuse before starting anything; returns its last line."""
    result = run_serve(*args)
    assert result.returncode == 2
    assert "started" not in result.stderr
    return result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("flag", "problem"),
    [
        ("--worker.no-such-flag=1", "the worker rejects its settings: unrecognized arguments: --no-such-flag=1"),
        pytest.param(
            "--scheduler.max-num-seqs=many",
            "the scheduler rejects its settings: --max-num-seqs (or LOCKSTEP_SCHEDULER_",
            marks=pytest.mark.slow,
        ),
        ("--tokenizer.num-encode-threads=0", "the tokenizer rejects its settings: --num-encode-threads (or LOCKSTEP_"),
    ],
)
def test_a_bad_flag_of_a_service_is_refused_before_anything_starts(tiny_model: Path, flag: str, problem: str) -> None:
    assert refused(str(tiny_model), free_address(), flag).startswith(f"error: {problem}")


async def test_a_cell_whose_output_is_not_read_serves_and_stops(tiny_model: Path, worker: Worker) -> None:
    address = f"127.0.0.1:{free_port()}"
    flags = (f"--listen={address}", f"--workers={worker.address}")
    with (
        full_pipe() as (reader, stderr),
        popen_lockstep("serve", str(tiny_model), *flags, stderr=stderr) as launcher,
    ):
        assert launcher.stdout is not None
        launcher.stdout.close()
        async with make_channel(address) as channel:
            await wait_until_serving(channel)
            # Until now its log was not read; from now on writing it fails.
            os.close(reader)
            stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
            assert [response async for response in stub.Generate(text_request("Hello", max_tokens=3))]
        launcher.terminate()
        assert launcher.wait(PATIENCE_S) == 0


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--listen=nowhere"], "--listen"),
        (["--listen=0.0.0.0:50051"], "--listen"),
        (["--log-level=loud"], "--log-level"),
        (["--worker.listen=unix:/tmp/x"], "--worker.listen"),
        (["--exit-after-prompt"], "--exit-after-prompt"),
        (["--workers=unix:/tmp/x", "--worker.ops-backend=native"], "--worker.X"),
        (["--workers=unix:/tmp/x", "--tp=2"], "--tp"),
    ],
)
def test_the_launcher_names_a_setting_it_refuses(arguments: list[str], name: str) -> None:
    result = run_serve("a-model", *arguments)

    assert result.returncode == 2
    assert f"error: {name}" in result.stderr.replace("lockstep serve: ", "").replace("argument ", "")


@pytest.mark.parametrize(
    "flag",
    [
        *("--listen", "--insecure-bind", "--http-listen", "--insecure-http-bind", "--scheduler-listen"),
        *(f"--{role}.manage-listen" for role in ROLES),
    ],
)
def test_a_taken_port_is_told_with_its_flag_before_anything_starts(tiny_model: Path, flag: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"

        line = refused(str(tiny_model), free_address(), f"{flag}={address}")

    assert line == f"error: {flag}: cannot listen on {address}: Address already in use"


def test_a_temporary_directory_with_too_long_a_path_is_told(tiny_model: Path, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()

    with popen_lockstep("serve", str(tiny_model), free_address(), temp_dir=str(long)) as launcher:
        _, stderr = launcher.communicate(timeout=PATIENCE_S)

    assert launcher.returncode == 2
    line = stderr.splitlines()[-1]
    assert re.fullmatch(rf"error: TMPDIR: {long} is too long: .* \d+ bytes, .* at most 107", line)
    assert list(long.iterdir()) == []


@pytest.mark.parametrize(
    ("num_bytes", "problem"),
    [
        (0, r"no directory for the cell's sockets can be made: .*No usable temporary directory found in .*"),
        # As many as the standard library writes to find out whether a directory can be written to.
        (4, r"/.*/lockstep-\w+ cannot be written to: .*File too large"),
    ],
)
def test_a_full_temporary_directory_is_told(tiny_model: Path, num_bytes: int, problem: str) -> None:
    command = python_command("-c", WITH_FULL_DISKS, str(num_bytes), "serve", str(tiny_model), free_address())
    result = subprocess.run(
        command, env=module_environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )

    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert re.fullmatch(f"error: TMPDIR: {problem}", result.stderr.splitlines()[-1])


def test_cells_are_not_looked_up_in_a_full_temporary_directory() -> None:
    command = python_command("-c", WITH_FULL_DISKS, "0", "top", "--once")
    result = subprocess.run(
        command, env=module_environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )

    assert "Traceback" not in result.stderr
    assert re.match(
        "note: the cells that are running here are not known: .*No usable temporary directory", result.stderr
    )


def test_the_next_start_removes_what_a_killed_launcher_left(tiny_model: Path, tmp_path: Path) -> None:
    # Its path is short enough for sockets.
    with tempfile.TemporaryDirectory(prefix="lockstep-test-") as temp_dir:
        with popen_lockstep("serve", str(tiny_model), free_address(), temp_dir=temp_dir) as killed:
            assert killed.stderr is not None
            assert any("serve: started" in line for line in killed.stderr)
            killed.kill()
        (left,) = Path(temp_dir).iterdir()
        assert (left / "cell.json").exists()

        with popen_lockstep("serve", str(tmp_path), free_address(), temp_dir=temp_dir) as refused_launcher:
            _, stderr = refused_launcher.communicate(timeout=PATIENCE_S)

        assert f"removed what a dead process left directory={left}" in stderr
        assert list(Path(temp_dir).iterdir()) == []


def test_a_model_directory_that_is_none_is_refused_before_anything_starts(tmp_path: Path) -> None:
    assert (
        refused(str(tmp_path), free_address()) == f"error: {tmp_path} is not a model directory: it has no config.json"
    )


def test_a_name_without_an_organisation_says_how_models_are_named() -> None:
    line = refused("smollm2", free_address())
    assert line.startswith(
        "error: smollm2 is not a directory here; a model of Hugging Face's hub is named ORG/NAME, such"
    )


def test_an_architecture_that_is_not_served_is_refused_before_anything_starts(tmp_path: Path) -> None:
    model_dir = write_tiny_llama(tmp_path, changes={"architectures": ["BloomForCausalLM"]})

    line = refused(str(model_dir), free_address())

    assert line.startswith(f"error: {model_dir}: config.json: architectures is ['BloomForCausalLM'], none of which is ")
    assert "LlamaForCausalLM" in line


def test_a_model_without_weights_is_refused_before_anything_starts(tmp_path: Path) -> None:
    model_dir = write_tiny_llama(tmp_path)
    weights = model_dir / "model.safetensors"
    weights.rename(model_dir / "pytorch_model.bin")
    line = refused(str(model_dir), free_address())
    assert line.startswith(
        f"error: the worker rejects its settings: {weights}: no such file; the weights are in pytorch_"
    )

    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n", encoding="utf-8")
    line = refused(str(model_dir), free_address())
    assert line.startswith(f"error: the worker rejects its settings: {weights} is a Git LFS pointer")


def test_a_draft_model_that_is_none_is_refused_before_anything_starts(tiny_model: Path, tmp_path: Path) -> None:
    missing = tmp_path / "none"
    assert (
        refused(str(tiny_model), free_address(), f"--draft-model={missing}") == f"error: {missing} is not a directory"
    )


def test_a_cell_can_be_of_workers_that_were_started_elsewhere_and_leaves_them(tiny_model: Path, worker: Worker) -> None:
    with start_cell(tiny_model, f"--workers={worker.address}", "--prompt=Say hello.") as cell:
        runtime_dir = cell.runtime_dir
        with cell.stub() as stub:
            responses = list(stub.Generate(text_request("Hello", max_tokens=3, ignore_eos=True)))

        assert sum(len(response.token_ids) for response in responses) == 3
        assert set(cell.role_to_process) == {"scheduler", "tokenizer"}
        # The prompt is answered once the cell is ready, which then serves on.
        assert cell.launcher.stdout is not None
        answer = ""
        while not re.search(r"\[\d+ tokens, ended by .* [\d.]+ tokens/s\]\n", answer):
            line = cell.launcher.stdout.readline()
            assert line, "the launcher ended before it had answered"
            answer += line
        assert answer.lstrip().startswith("> Say hello.\n")

        assert cell.stop(signal.SIGINT) == 0

        assert_stopped_in_order(cell, "tokenizer", "scheduler")
        assert_nothing_is_left(cell, runtime_dir)
        assert worker.process.poll() is None


def test_over_tls_a_prompt_is_answered_on_stdout_before_the_launcher_ends(
    tiny_model: Path, worker: Worker, tmp_path: Path
) -> None:
    prompt = "Say hello."
    authority = Authority()
    files = write_files(tmp_path, authority.issue_role(Role.TOKENIZER), authority)
    flags = (f"--listen=0.0.0.0:{free_port()}", f"--workers={worker.address}")

    result = run_serve(str(tiny_model), *flags, f"--prompt={prompt}", "--exit-after-prompt", *tls_flags(files))

    assert result.returncode == 0, result.stderr
    ready, _, rest = result.stdout.partition("\n")
    assert ready.startswith("ready: serving")
    question, answer = rest.strip().split("\n", maxsplit=1)
    assert question == f"> {prompt}"
    assert re.search(r"\[\d+ tokens, ended by .* [\d.]+ tokens/s\]$", answer.strip())
    assert prompt not in result.stderr
    refused = run_serve(str(tiny_model), *flags, *tls_flags(files), f"--tls-key={files.authority}")
    assert refused.returncode == 2
    assert refused.stderr == f"error: --tls-key {files.authority}: not an unencrypted private key in PEM\n"


def test_an_idle_cell_uses_little_of_a_core(real_cell: Cell) -> None:
    processes = [psutil.Process(real_cell.launcher.pid), *real_cell.role_to_process.values()]

    before = sum(sum(process.cpu_times()[:2]) for process in processes)
    with pytest.raises(subprocess.TimeoutExpired):
        real_cell.launcher.wait(IDLE_S)
    used_s = sum(sum(process.cpu_times()[:2]) for process in processes) - before

    # Heartbeats go both ways on two links, about twice a second.
    assert used_s < 0.03 * IDLE_S
