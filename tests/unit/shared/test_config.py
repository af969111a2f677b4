"""Settings: flags override the environment, which overrides the defaults, and an invalid value is named."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import Field, ValidationError, model_validator
from pydantic_settings import SettingsConfigDict

from shared.config import ServiceSettings, load_settings, log_settings
from shared.network.tls import Role
from shared.process.logging import TextFormatter
from shared.setting_types import ListenAddress, check_local_address, check_trust_domain
from tests.support.cells.certificates import Authority, write_files
from tests.support.system.processes import module_environment

AUTHORITY = Authority()


class ExampleSettings(ServiceSettings):
    """A service's settings."""

    model_config = SettingsConfigDict(env_prefix="LOCKSTEP_EXAMPLE_", cli_prog_name="example")

    role = Role.WORKER

    listen: ListenAddress = "127.0.0.1:1"
    num_things: int = Field(default=3, ge=1, description="How many things.")
    most_things: int = Field(default=9, description="The most things.")

    @model_validator(mode="after")
    def _check_things(self) -> ExampleSettings:
        if self.num_things > self.most_things:
            raise ValueError("--num-things is above --most-things")
        return self


def test_a_flag_overrides_the_environment_which_overrides_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings(ExampleSettings, []).num_things == 3
    monkeypatch.setenv("LOCKSTEP_EXAMPLE_NUM_THINGS", "4")
    assert load_settings(ExampleSettings, []).num_things == 4
    assert load_settings(ExampleSettings, ["--num-things", "5"]).num_things == 5


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--num-things=0"], "--num-things (or LOCKSTEP_EXAMPLE_NUM_THINGS): "),
        (["--num-things=many"], "--num-things (or LOCKSTEP_EXAMPLE_NUM_THINGS): "),
        (["--log-level=loud"], "--log-level"),
        (["--num-things=10"], "error: --num-things is above --most-things\n"),
        (["--no-such-thing=1"], "--no-such-thing"),
    ],
)
def test_an_invalid_value_is_named_and_ends_the_process(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        load_settings(ExampleSettings, args)

    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_an_invalid_value_in_the_environment_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCKSTEP_EXAMPLE_NUM_THINGS", "none")

    with pytest.raises(SystemExit):
        load_settings(ExampleSettings, [])

    assert "LOCKSTEP_EXAMPLE_NUM_THINGS" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("encoding", "cause"),
    [("utf-8", ""), ("ascii", "; the locale's encoding is ascii: use one of UTF-8, such as LC_ALL=C.UTF-8")],
)
def test_a_value_that_is_no_text_is_named_with_the_locale_that_may_be_the_cause(
    encoding: str, cause: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: encoding)
    with pytest.raises(SystemExit) as caught:
        load_settings(ExampleSettings, ["--listen=unix:/tmp/caf\udcc3\udca9"])

    assert caught.value.code == 2
    assert capsys.readouterr().err == f"error: --listen (or LOCKSTEP_EXAMPLE_LISTEN): not UTF-8{cause}\n"


def test_settings_are_immutable() -> None:
    settings = load_settings(ExampleSettings, [])

    with pytest.raises(ValidationError):
        settings.num_things = 5


@pytest.mark.parametrize("address", ["unix:/run/x.sock", "127.0.0.1:50051", "localhost:0", "[::1]:1"])
def test_a_local_address_is_a_unix_socket_or_loopback(address: str) -> None:
    assert check_local_address(address) == address


@pytest.mark.parametrize("address", ["0.0.0.0:1", "example.org:1", "[::]:1", "127.0.0.2.example.org:1"])
def test_an_address_that_other_machines_can_reach_is_not_local(address: str) -> None:
    with pytest.raises(ValueError, match="unix socket or loopback"):
        check_local_address(address)


@pytest.fixture
def tls_flags(tmp_path: Path) -> list[str]:
    """The flags of TLS for a worker."""
    files = write_files(tmp_path, AUTHORITY.issue_role(Role.WORKER), AUTHORITY)
    return [
        f"--tls-cert={files.certificate}",
        f"--tls-key={files.key}",
        f"--tls-ca={files.authority}",
        f"--trust-domain={files.trust_domain}",
    ]


def test_with_tls_a_service_listens_anywhere(tls_flags: list[str]) -> None:
    settings = load_settings(ExampleSettings, [*tls_flags, "--listen=0.0.0.0:7"])

    assert settings.bind_address == "0.0.0.0:7"
    assert settings.certificates is not None


def test_without_tls_a_service_listens_on_this_machine_only(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_settings(ExampleSettings, ["--listen=0.0.0.0:7"])
    assert "--listen (or LOCKSTEP_EXAMPLE_LISTEN): without TLS only this machine may connect" in capsys.readouterr().err


def test_without_tls_there_are_no_certificates() -> None:
    assert load_settings(ExampleSettings, []).certificates is None


def test_a_part_of_the_tls_settings_is_refused(tls_flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for missing in range(len(tls_flags)):
        with pytest.raises(SystemExit):
            load_settings(ExampleSettings, [flag for number, flag in enumerate(tls_flags) if number != missing])
        assert "must be used together" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--insecure-bind=0.0.0.0:7", "--insecure-bind cannot be used with TLS"),
        ("--trust-domain=Cell.test", "--trust-domain (or LOCKSTEP_EXAMPLE_TRUST_DOMAIN): must be a DNS name"),
        ("--trust-domain=other.test", "lacks the DNS name worker.other.test"),
        ("--tls-key=/none", "--tls-key /none: No such file or directory"),
    ],
)
def test_tls_settings_that_cannot_be_used_are_refused(
    tls_flags: list[str], flag: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        load_settings(ExampleSettings, [*tls_flags, flag])

    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["cell.example.org", "a", "0-1.b", "a" * 63 + ".b"])
def test_a_trust_domain_is_a_dns_name_in_lower_case(name: str) -> None:
    assert check_trust_domain(name) == name


@pytest.mark.parametrize(
    "name", ["", "A.b", "a..b", ".a", "a.", "-a", "a-.b", "a_b", "a b", "ä", "a/b", "a" * 64, "a\n"]
)
def test_what_is_no_dns_name_is_no_trust_domain(name: str) -> None:
    with pytest.raises(ValueError, match="DNS name"):
        check_trust_domain(name)


def test_insecure_bind_replaces_the_address_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    settings = load_settings(ExampleSettings, ["--insecure-bind=0.0.0.0:7"])

    with caplog.at_level(logging.WARNING, logger="shared.config"):
        log_settings(settings)

    assert settings.bind_address == "0.0.0.0:7"
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_the_log_has_the_settings_that_differ_from_their_defaults(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="shared.config"):
        log_settings(load_settings(ExampleSettings, ["--most-things=8", "--num-things=3", "--log-format=json"]))

    (record,) = caplog.records
    assert TextFormatter("example").format(record).endswith(" INFO example: settings log_format=json most_things=8")


@pytest.mark.process
@pytest.mark.parametrize(
    "command",
    [["services.scheduler"], ["services.tokenizer"], ["services.worker"], ["services.cli", "serve"]],
    ids=lambda command: command[0],
)
def test_no_service_starts_without_assertions(command: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-O", "-m", *command, "--help"],
        env=module_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert "-O (or PYTHONOPTIMIZE) removes the integrity checks" in result.stderr
