"""The unit file for systemd, and the signals that systemd sends when it stops the unit."""

from __future__ import annotations

import configparser
import shlex
from collections.abc import Mapping

import psutil

from tests.support.system.processes import ROOT

UNIT = ROOT / "deploy" / "systemd" / "lockstep.service"


def read_service() -> Mapping[str, str]:
    """The unit's section `[Service]`, in which no key may occur twice."""
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text(encoding="utf-8"))
    return parser["Service"]


def command_of(service: Mapping[str, str], environment: Mapping[str, str]) -> list[str]:
    """The arguments that the unit starts; `$NAME` is split into words, `${NAME}` is one, as systemd has it."""
    words = []
    for word in shlex.split(service["ExecStart"]):
        if word.startswith("${"):
            words.append(environment[word[2:-1]])
        elif word.startswith("$"):
            words += environment[word[1:]].split()
        else:
            words.append(word)
    return words


def processes_asked_to_stop(service: Mapping[str, str], main: psutil.Process) -> list[psutil.Process]:
    """The processes that get the first signal when the unit is stopped, `main` first.

    Source: systemd.kill(5), KillMode.
    """
    assert service.get("KillMode", "control-group") == "control-group"
    return [main, *main.children(recursive=True)]


def stop_signal(service: Mapping[str, str]) -> str:
    """The name of the signal that they get."""
    return service.get("KillSignal", "SIGTERM")
