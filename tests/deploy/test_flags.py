"""Every rendered flag is accepted by its service: the real settings models read the rendered arguments."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from services.cli.clients import generate
from services.cli.ranks_settings import RanksSettings, split_worker_flags
from services.scheduler.config import SchedulerSettings
from services.tokenizer.config import TokenizerSettings
from services.worker.config import WorkerSettings
from shared.config import ServiceSettings, load_settings
from tests.support.cells.certificates import Authority
from tests.support.deploy.chart import CHART, EXAMPLES, Tree, find, pod_templates, render, rendered_examples
from tests.support.deploy.chart_values import values
from tests.support.system.ports import free_port

CASES = [f"{path.stem} {kind}" for path in EXAMPLES for kind in ("StatefulSet", "LeaderWorkerSet")]
# What a LeaderWorkerSet's controller, or the kubelet, puts in place.
VARIABLES = {"GROUP_INDEX": "1", "NODE_RANK": "1", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "w-0.w.ns"}
MODELS: Mapping[str, type[ServiceSettings]] = {"tokenizer": TokenizerSettings, "scheduler": SchedulerSettings}
WORKER_ARGS = ("--model-dir=/models",)


@dataclass(frozen=True, slots=True)
class Certificates:
    """Makes the files that a pod would mount."""

    folder: Path
    authority: Authority

    def account(self) -> list[str]:
        """The flag that names a folder with the files of a service account."""
        folder = self.folder / "account"
        folder.mkdir(exist_ok=True)
        for name in ("namespace", "token", "ca.crt"):
            (folder / name).write_text("small", encoding="utf-8")
        return [f"--discovery-service-account={folder}"]

    def mount(self, role: str, domain: str) -> Path:
        """A folder with the certificate of a role of a domain."""
        folder = self.folder / f"{role}.{domain}"
        if not folder.exists():
            folder.mkdir()
            issued = self.authority.issue(dns=[f"{role}.{domain}"], uris=[f"spiffe://{domain}/{role}"])
            for name, data in {
                "tls.crt": issued.certificate,
                "tls.key": issued.key,
                "ca.crt": self.authority.pem,
            }.items():
                (folder / name).write_bytes(data)
        return folder


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls"), Authority())


def arguments(objects: list[Tree], component: str, certificates: Certificates) -> Iterator[list[str]]:
    """The arguments of a component's containers, as the process would get them."""
    for _, template in pod_templates(objects):
        if template["metadata"]["labels"]["app.kubernetes.io/component"] == component:
            args = template["spec"]["containers"][0]["args"]
            domain = next((arg.partition("=")[2] for arg in args if arg.startswith("--trust-domain=")), "")
            role = "tokenizer" if component == "test" else component
            folder = certificates.mount(role, domain) if domain else Path()
            # What kubelet mounts where a flag does not name another folder.
            account = certificates.account() if "--discovery=kubernetes" in args else []
            yield [*(substitute(arg, folder) for arg in args), *account]


def substitute(arg: str, tls: Path) -> str:
    for name, value in VARIABLES.items():
        arg = arg.replace(f"$({name})", value)
    return arg.replace("=/tls/", f"={tls}/")


@pytest.mark.parametrize("example", CASES)
@pytest.mark.parametrize("component", ["tokenizer", "scheduler"])
def test_a_service_accepts_its_flags(example: str, component: str, certificates: Certificates) -> None:
    found = list(arguments(rendered_examples()[example], component, certificates))
    assert found
    for args in found:
        load_settings(MODELS[component], args)


@pytest.mark.parametrize("discovery", ["dns", "kubernetes"])
def test_a_scheduler_that_discovers_its_workers_accepts_its_flags(discovery: str, certificates: Certificates) -> None:
    tree = render(values=values({"scheduler": {"discovery": discovery}, "workers": {"dp": 2}}))
    for args in arguments(tree, "scheduler", certificates):
        assert load_settings(SchedulerSettings, args).discovery == discovery
    # A worker that is discovered has no place of its own.
    for args in arguments(tree, "worker", certificates):
        own, _ = split_worker_flags(args)
        assert load_settings(RanksSettings, own).domain.dp_rank_of(0) is None


@pytest.mark.parametrize("example", CASES)
def test_the_launcher_and_its_workers_accept_their_flags(example: str, certificates: Certificates) -> None:
    found = list(arguments(rendered_examples()[example], "worker", certificates))
    assert found
    for args in found:
        own, worker_flags = split_worker_flags(args)
        load_settings(RanksSettings, own)
        load_settings(WorkerSettings, [*WORKER_ARGS, *worker_flags])


def test_services_accept_the_flags_of_ipv6(certificates: Certificates) -> None:
    objects = render(values=values({"workers": {"tp": 2}}, ipFamilies=["IPv6"]))
    for component, model in MODELS.items():
        for args in arguments(objects, component, certificates):
            assert load_settings(model, args).bind_address.startswith("[::]:")
    for args in arguments(objects, "worker", certificates):
        own, worker_flags = split_worker_flags(args)
        assert load_settings(RanksSettings, own).bind_address.startswith("[::]:")
        load_settings(WorkerSettings, [*WORKER_ARGS, *worker_flags])


def test_each_setting_reaches_its_service_with_its_value(certificates: Certificates) -> None:
    """All settings that have a default, at once: flags of every type are written as the service reads them."""
    parts: dict[str, type[ServiceSettings]] = {**MODELS, "workers": WorkerSettings}
    names = {part: settable(part) for part in parts}
    settings = {part: {name: default(model, name) for name in names[part]} for part, model in parts.items()}
    settings = {
        part: {name: value for name, value in each.items() if value is not None} for part, each in settings.items()
    }
    objects = render(values=values({part: {"settings": each} for part, each in settings.items()}))
    for part, model in parts.items():
        (args,) = arguments(objects, part.removesuffix("s"), certificates)
        prefix = "--worker." if part == "workers" else "--"
        given = [f"--{arg.removeprefix(prefix)}" for arg in args if is_setting(arg, prefix, settings[part])]
        read = load_settings(model, [*given, *(["--model-dir=/models"] if part != "scheduler" else [])])
        assert read.model_fields_set >= {name.replace("-", "_") for name in settings[part]}
        assert {name: getattr(read, name) for name in read.model_fields_set - {"model_dir"}} == {
            name: model.model_fields[name].default for name in read.model_fields_set - {"model_dir"}
        }


def settable(part: str) -> list[str]:
    """The names of a part's settings in the schema."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    return list(schema["definitions"][part]["properties"]["settings"]["propertyNames"]["enum"])


def default(model: type[ServiceSettings], name: str) -> Any:
    value = model.model_fields[name.replace("-", "_")].default
    return (",".join(map(str, value)) or None) if isinstance(value, tuple) else value


def is_setting(arg: str, prefix: str, settings: Mapping[str, object]) -> bool:
    name = arg.removeprefix(prefix).partition("=")[0]
    return arg.startswith(prefix) and (name in settings or name.removeprefix("no-") in settings)


@pytest.mark.parametrize("example", CASES)
def test_the_client_accepts_the_flags_of_the_test_pod(
    example: str, certificates: Certificates, capsys: pytest.CaptureFixture[str]
) -> None:
    pods = find(rendered_examples()[example], "Pod", "-test")
    for args in arguments(pods, "test", certificates):
        here = [f"--target=unix:{certificates.folder}/none" if arg.startswith("--target=") else arg for arg in args]
        assert generate.main([*here, "--timeout=0.1"]) == 1
        assert "error: usage" not in capsys.readouterr().err


@pytest.mark.process
@pytest.mark.parametrize("example", CASES)
def test_the_client_of_http_accepts_the_flags_of_its_test_pod(example: str) -> None:
    for pod in find(rendered_examples()[example], "Pod", "-test-http"):
        command = [sys.executable, str(CHART / "files" / "ask_http.py"), *pod["spec"]["containers"][0]["args"]]
        nobody = [f"--target=127.0.0.1:{free_port()}", "--timeout=0"]
        result = subprocess.run([*command, *nobody], capture_output=True, text=True, check=False)
        assert (result.returncode, result.stderr[:17]) == (1, "error: no answer:")
