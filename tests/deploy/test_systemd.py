"""The unit file for systemd; test_planned_stop stops a cell as systemd does."""

from __future__ import annotations

import shlex

from services.cli.processes.cell_processes import STOP_GRACE_S
from services.cli.serve_settings import ServeSettings, split_service_flags
from shared.config import load_settings
from tests.support.deploy.unit_file import command_of, read_service

ENVIRONMENT = {"MODEL_DIR": "/srv/a model", "FLAGS": "--listen=127.0.0.1:50051 --tp=2 --worker.num-threads=4"}


def test_the_command_is_one_that_the_launcher_accepts() -> None:
    program, command, *arguments = command_of(read_service(), ENVIRONMENT)

    own_arguments, role_to_flags = split_service_flags(arguments)
    settings = load_settings(ServeSettings, own_arguments)
    assert program.endswith("/bin/lockstep")
    assert command == "serve"
    assert str(settings.model_dir) == ENVIRONMENT["MODEL_DIR"]
    assert (settings.tp, role_to_flags["worker"]) == (2, ["--num-threads=4"])


def test_a_stop_asks_every_process_and_leaves_them_the_drain_time_and_ten_seconds_more() -> None:
    service = read_service()

    drain_s = load_settings(ServeSettings, ["/srv/model"]).drain_s
    assert float(service["TimeoutStopSec"]) >= drain_s + STOP_GRACE_S
    # The defaults: SIGTERM to the whole control group, then SIGKILL.
    assert not {"KillMode", "KillSignal", "SendSIGHUP", "SendSIGKILL", "RestartKillSignal"} & service.keys()


def test_settings_that_are_refused_are_not_tried_again() -> None:
    service = read_service()

    assert service["Restart"] == "on-failure"
    assert shlex.split(service["RestartPreventExitStatus"]) == ["2"]
