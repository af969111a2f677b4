"""The chart's pods run as rendered: processes on loopback serve, pass their probes, and survive the loss of a node."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.chart import CHART, render
from tests.support.patience import PATIENCE_S
from tests.support.rendered_pods import Cluster, running
from tests.support.tiny_llama import write_tiny_llama

EXAMPLES = CHART / "examples"
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
SERVICES = ("worker", "scheduler", "tokenizer")
# As much as a test needs.
SMALL = {"num-threads": 1, "kv-cache-num-blocks": 256}


async def test_the_cpu_demo_runs_as_rendered(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "models" / "smollm2-135m-instruct", changes={"num_hidden_layers": 2})
    objects = render(EXAMPLES / "cpu-demo.yaml", values={"cellDefaults": {"workers": {"settings": SMALL}}})
    cluster = Cluster(objects, tmp_path / "cluster", {"models": tmp_path / "models"})
    pods = [pod for component in SERVICES for pod in cluster.of(component)]
    assert len(pods) == 4
    with running(pods):
        for probe in PROBES:
            for pod in pods:
                await pod.wait_until_probed(probe)
        [test] = cluster.of("test")
        with test.log_path.open("w") as log:
            process = test.start(log, stdout=subprocess.PIPE)
        answer, _ = process.communicate(timeout=PATIENCE_S)

    assert process.returncode == 0, test.log_path.read_text(encoding="utf-8")
    assert answer.strip()
