"""What `lockstep serve` checks before it starts any process."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from services.cli.processes.preflight import RefusedError, check_listeners, check_model_dir
from services.cli.processes.service_command import Listener
from tests.support.models.kimi_vocabulary import write_kimi_vocabulary
from tests.support.system.ports import free_port


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (directory / "tokenizer.json").write_text("{}")
    return directory


def check_addresses(addresses: list[str]) -> None:
    check_listeners([Listener(f"--flag-{number}", address) for number, address in enumerate(addresses)])


def check(model_dir: Path) -> None:
    check_model_dir(model_dir, ["config.json", "tokenizer.json"], "auto")


def test_a_model_directory_is_accepted(model_dir: Path) -> None:
    check(model_dir)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="nowhere is not a directory"):
        check(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(model_dir: Path, name: str) -> None:
    (model_dir / name).unlink()
    with pytest.raises(RefusedError, match=f"model is not a model directory: it has no {name}"):
        check(model_dir)


def test_kimis_vocabulary_is_converted(model_dir: Path) -> None:
    (model_dir / "tokenizer.json").unlink()
    write_kimi_vocabulary(model_dir)
    check(model_dir)
    assert (model_dir / "tokenizer.json").is_file()


def test_a_vocabulary_that_cannot_be_converted_is_named(model_dir: Path) -> None:
    (model_dir / "tokenizer.json").unlink()
    write_kimi_vocabulary(model_dir)
    (model_dir / "tiktoken.model").write_text("!")
    with pytest.raises(RefusedError, match=r"tiktoken\.model, line 1: no token in base64"):
        check(model_dir)


def test_an_unreadable_configuration_is_named(model_dir: Path) -> None:
    (model_dir / "config.json").write_text("[")
    with pytest.raises(RefusedError, match=r"config\.json: Expecting value"):
        check(model_dir)


@pytest.mark.parametrize(
    ("architectures", "message"),
    [
        (
            '["BertModel"]',
            r"architectures is \['BertModel'\], none of which is supported; supported: .*LlamaForCausalLM",
        ),
        ("5", "architectures is 5, not a list of names"),
        ("null", "architectures is missing or empty; supported: "),
    ],
)
def test_an_architecture_that_is_not_served_is_told(model_dir: Path, architectures: str, message: str) -> None:
    (model_dir / "config.json").write_text(f'{{"architectures": {architectures}}}')
    with pytest.raises(RefusedError, match=rf"^{model_dir}: config\.json: {message}"):
        check(model_dir)


def test_a_multimodal_model_whose_text_is_not_served_is_told(model_dir: Path) -> None:
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "mistral4"}}
    (model_dir / "config.json").write_text(json.dumps(config))
    with pytest.raises(RefusedError, match=rf"^{model_dir}: config\.json: text_config\.model_type 'mistral4' is not"):
        check(model_dir)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_git_lfs_pointer_is_told(model_dir: Path, name: str) -> None:
    (model_dir / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n")
    with pytest.raises(RefusedError, match=f"^{model_dir / name} is a Git LFS pointer"):
        check(model_dir)


@pytest.mark.parametrize(
    ("missing", "present", "advice"),
    [
        ("tokenizer.json", "tokenizer.model", "the vocabulary is in tokenizer.model, which must be converted"),
        ("config.json", "params.json", "the directory is in Mistral's own format"),
    ],
)
def test_what_a_directory_has_in_place_of_a_file_is_told(
    model_dir: Path, missing: str, present: str, advice: str
) -> None:
    (model_dir / missing).rename(model_dir / present)
    with pytest.raises(RefusedError, match=f"it has no {missing}; {advice}"):
        check(model_dir)


def test_unused_addresses_are_accepted(tmp_path: Path) -> None:
    check_addresses([f"unix:{tmp_path}/socket", "127.0.0.1:0", "localhost:0", "0.0.0.0:0"])
    assert list(tmp_path.iterdir()) == []


def test_two_services_on_one_port_are_refused_however_the_host_is_written() -> None:
    port = free_port()
    with pytest.raises(RefusedError, match=f"--flag-1: cannot listen on localhost:{port}: Address already in use"):
        check_addresses([f"127.0.0.1:{port}", f"localhost:{port}"])


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_a_port_in_use_is_named(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"{host}:{other.getsockname()[1]}"
        with pytest.raises(RefusedError, match=f"^--flag-0: cannot listen on {address}: Address already in use"):
            check_addresses([address])


def test_a_socket_in_use_is_named_and_a_stale_one_is_accepted(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/socket"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(f"{tmp_path}/socket")
        other.listen()
        with pytest.raises(RefusedError, match=f"^--flag-0: cannot listen on {address}: .*already in use"):
            check_addresses([address])
    check_addresses([address])


@pytest.mark.parametrize(
    "address",
    ["unix:/nowhere/socket", f"unix:/tmp/{'x' * 200}", "192.0.2.1:7", "no-host.invalid:7", "no-port", "::1:7"],
)
def test_an_unusable_address_is_named(address: str) -> None:
    with pytest.raises(RefusedError, match=f"cannot listen on {address}: (?!Unknown error)"):
        check_addresses([address])
