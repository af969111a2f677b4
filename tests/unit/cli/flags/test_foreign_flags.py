"""Other servers' flags: ours where the meaning is the same, else one line that names ours."""

from __future__ import annotations

import re

import pytest

from services.cli.flags.foreign_flags import ADVICE, ALIASES, MODEL, Alias, ForeignFlagError, translate
from services.cli.launcher_settings import flags_of_roles
from services.cli.processes.service_command import ROLES
from services.cli.serve_settings import ServeSettings, split_service_flags
from shared.config import load_settings

OUR_FLAGS = {
    MODEL,
    *(f"--{name.replace('_', '-')}" for name in ServeSettings.model_fields),
    *flags_of_roles(ROLES),
}


def settings_of(*argv: str) -> tuple[ServeSettings, dict[str, list[str]]]:
    own, roles = split_service_flags(translate(argv))
    return load_settings(ServeSettings, own), roles


@pytest.mark.parametrize("alias", ALIASES, ids=lambda alias: alias.names[0])
def test_an_alias_is_a_flag_that_exists_with_its_value_whichever_way_it_is_written(alias: Alias) -> None:
    assert alias.ours in OUR_FLAGS
    assert not OUR_FLAGS & {*alias.names}
    for name in alias.names:
        if not alias.has_value:
            assert translate(["m", name, "x"]) == ["m", alias.ours, "x"]
            continue
        expected = "v" if alias.ours == MODEL else f"{alias.ours}={alias.form('v')}"
        assert translate(["a", name, "v", "b"]) == translate(["a", f"{name}=v", "b"]) == ["a", expected, "b"]
        for argv in ([name], [name, "--ep"]):
            with pytest.raises(ForeignFlagError, match=f"^{name} needs a value"):
                translate(argv)


def test_what_is_no_alias_names_only_flags_that_exist_and_none_of_ours_is_among_them() -> None:
    for advice in ADVICE:
        assert {*advice.ours} <= OUR_FLAGS
        assert {*re.findall(r"--[a-z.-]+", advice.text)} == {*advice.ours}, advice.names
        assert not OUR_FLAGS & {*advice.names}
        for name in advice.names:
            with pytest.raises(ForeignFlagError, match=f"^{name}: "):
                translate(["m", f"{name}=1"])
    names = [name for row in (*ALIASES, *ADVICE) for name in row.names]
    assert len({*names, "--host", "--port"}) == len(names) + 2


def test_our_own_flags_are_left_as_they_are() -> None:
    argv = ["m", *(flag for flag in sorted(OUR_FLAGS) if flag != MODEL), "--worker.x", "v", "--prompt", "--host-like"]
    assert translate(argv) == argv


def test_what_people_type_means_what_it_says() -> None:
    settings, roles = settings_of(
        *(
            "-m",
            "models/x",
            "--port",
            "8001",
            "-tp",
            "2",
            "--max-num-seqs",
            "8",
            "--ctx-size=4096",
            "--dtype",
            "float32",
        )
    )
    assert (str(settings.model_dir), settings.tp, settings.max_model_len) == ("models/x", 2, 4096)
    assert settings.http_address == "127.0.0.1:8001"
    assert roles["scheduler"] == ["--max-num-seqs=8"]
    assert roles["worker"] == ["--dtype=float32"]


@pytest.mark.parametrize("size", ["-c=0", "--ctx-size=0"])
def test_a_context_of_zero_is_the_models_own(size: str) -> None:
    assert settings_of("m", size)[0].max_model_len == "auto"


@pytest.mark.parametrize(
    ("argv", "address"),
    [
        (["--host", "127.0.0.1"], "127.0.0.1:8000"),
        (["--host=localhost", "--port=9"], "localhost:9"),
        (["--host", "::1"], "[::1]:8000"),
        (["--host", "[::1]", "--port", "1"], "[::1]:1"),
        (["--uds", "/run/x"], "unix:/run/x"),
    ],
)
def test_a_host_on_this_machine_is_taken(argv: list[str], address: str) -> None:
    assert settings_of("m", *argv)[0].http_address == address


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_any_other_host_never_becomes_an_insecure_listener(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings_of("m", "--host", host)
    said = capsys.readouterr().err
    assert "--tls-cert" in said
    assert f"--insecure-http-bind={'[::]' if host == '::' else host}:8000" in said


@pytest.mark.parametrize("flag", ["--http-listen=unix:x", "--insecure-http-bind=a:1", "--no-http"])
def test_two_places_are_refused(flag: str) -> None:
    with pytest.raises(ForeignFlagError, match=f"^--port cannot be used with {flag.partition('=')[0]}"):
        translate(["m", "--port=1", flag])


def test_a_port_that_is_none_is_refused() -> None:
    with pytest.raises(ForeignFlagError, match=r"^--port: 'http' is no number"):
        translate(["m", "--port", "http"])
