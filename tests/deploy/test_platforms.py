"""The values that the README gives for platforms with rules of their own."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.support.deploy.chart import CHART, find, pod_templates, render
from tests.support.deploy.chart_values import downloaded_values
from tests.support.deploy.kubernetes_schemas import find_errors


def given(heading: str) -> Any:
    """The values in the section of this heading."""
    document = (CHART / "README.md").read_text(encoding="utf-8")
    section = document.partition(f"\n### {heading}\n")[2].partition("\n#")[0]
    (block,) = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    return yaml.safe_load(block)


def test_on_openshift_pods_name_no_user_and_reach_its_dns() -> None:
    objects = render(values=downloaded_values(**given("OpenShift")))
    found = dict(pod_templates(objects))
    assert {name.partition("/")[0] for name in found} == {"Deployment", "StatefulSet", "Job", "Pod"}
    for name, template in found.items():
        context = template["spec"]["securityContext"]
        assert [context.get(field) for field in ("runAsUser", "runAsGroup", "fsGroup")] == [None] * 3, name
        assert context["runAsNonRoot"] is True, name
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, name
    (policy,) = find(objects, "NetworkPolicy", "-dns")
    (rule,) = policy["spec"]["egress"]
    assert "openshift-dns" in str(rule["to"])
    assert {port["port"] for port in rule["ports"]} == {5353}


@pytest.mark.slow
@pytest.mark.parametrize("major", [3, 4])
def test_openshifts_values_are_valid(major: int) -> None:
    assert find_errors(render(values=downloaded_values(**given("OpenShift")), major=major), 36) == []


def test_in_a_mesh_no_pod_gets_a_sidecar() -> None:
    for name, template in pod_templates(render(values=downloaded_values(**given("Meshes")))):
        assert template["metadata"]["labels"]["sidecar.istio.io/inject"] == "false", name
        assert template["metadata"]["labels"]["istio.io/dataplane-mode"] == "none", name
