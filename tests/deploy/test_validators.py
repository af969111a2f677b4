"""Helm 3 and 4, the schemas of every supported Kubernetes, and trivy have nothing to say against the examples."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.deploy.chart import CHART, EXAMPLES, KUBERNETES, LEADER_WORKER_SETS, Tree, find, helm, render
from tests.support.deploy.chart_values import pools, values
from tests.support.deploy.deploy_tools import NEWEST_KUBERNETES, OLDEST_KUBERNETES
from tests.support.deploy.kubernetes_schemas import find_errors
from tests.support.system.package_tools import tool

pytestmark = [pytest.mark.slow, pytest.mark.process]

# The least that an example needs: image volumes and dynamic resource allocation came later than the chart's own least.
OLDEST_OF = {"nvidia": 34}
NAMES = [path.stem for path in EXAMPLES]


@pytest.mark.parametrize("name", NAMES)
def test_helm_3_and_4_lint_and_render_an_example_equally(name: str) -> None:
    path = CHART / "examples" / f"{name}.yaml"
    for major in (3, 4):
        helm("lint", "--strict", str(CHART), f"--values={path}", f"--kube-version={KUBERNETES}", major=major)
    assert by_name(render(path, major=3)) == by_name(render(path, major=4))


def by_name(objects: list[Tree]) -> dict[tuple[str, str], Tree]:
    return {(each["kind"], each["metadata"]["name"]): each for each in objects}


@pytest.mark.parametrize("name", NAMES)
def test_an_example_fits_every_kubernetes(name: str) -> None:
    path = CHART / "examples" / f"{name}.yaml"
    for minor in range(OLDEST_OF.get(name, OLDEST_KUBERNETES), NEWEST_KUBERNETES + 1):
        apis = [LEADER_WORKER_SETS] if minor % 2 else []
        assert find_errors(render(path, kubernetes=f"1.{minor}.0", apis=apis), minor) == [], minor


def test_a_model_s_image_fits_every_kubernetes_that_mounts_one() -> None:
    image = f"models/m@sha256:{'1' * 64}"
    for minor in range(33, NEWEST_KUBERNETES + 1):
        objects = render(values=values({"model": {"pvc": "", "image": image}}), kubernetes=f"1.{minor}.0")
        assert find_errors(objects, minor) == [], minor


def test_a_pool_fits_its_api_with_every_failure_mode_and_protocol() -> None:
    for mode, protocol in itertools.product(({}, {"failureMode": "FailOpen"}), ("grpc", "http")):
        picker = {"name": "picker", "port": 9002, **mode}
        objects = render(values=pools({"endpointPicker": picker, "protocol": protocol}))
        assert find_errors(objects, NEWEST_KUBERNETES) == []


def test_the_schemas_find_what_is_wrong() -> None:
    objects = render(EXAMPLES[0], apis=[LEADER_WORKER_SETS]) + find(render(values=pools({})), "InferencePool")
    for each in objects:
        match each["kind"]:
            case "Service":
                each["spec"]["ports"][0]["port"] = "50051"
            case "LeaderWorkerSet":
                each["spec"]["leaderWorkerTemplate"]["restartPolicy"] = "Never"
                each["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["contaners"] = []
            case "InferencePool":
                each["spec"]["appProtocol"] = "h2c"
            case "Certificate":
                each["spec"]["usage"] = []
    errors = "\n".join(find_errors(objects, NEWEST_KUBERNETES))
    assert all(word in errors for word in ("'50051'", "'h2c'", "'Never'", "contaners", "'usage'"))


@pytest.mark.parametrize("name", NAMES)
def test_trivy_finds_nothing_high_or_critical(name: str, tmp_path: Path) -> None:
    # It would take the examples for manifests.
    chart = tmp_path / "lockstep"
    shutil.copytree(CHART, chart, ignore=shutil.ignore_patterns("examples"))
    command = [
        *(str(tool("trivy")), "config", "--quiet", "--format=json", "--skip-check-update", "--skip-version-check"),
        *(
            "--disable-telemetry",
            f"--helm-values={CHART / 'examples' / f'{name}.yaml'}",
            f"--helm-kube-version={KUBERNETES}",
        ),
        str(chart),
    ]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    results = report["Results"]
    assert sum(each["MisconfSummary"]["Successes"] for each in results) > 100
    found = [found for each in results for found in each.get("Misconfigurations", [])]
    assert [(each["ID"], each["Message"]) for each in found if each["Severity"] in {"HIGH", "CRITICAL"}] == []
