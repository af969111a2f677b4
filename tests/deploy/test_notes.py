"""What Helm prints after an install: what there is, who may call it, and how to try it.

By Helm 4 alone: Helm 3 asks a cluster first, also when it only simulates.
"""

from __future__ import annotations

import json

import pytest

from tests.support.deploy.chart import CHART, EXAMPLES, Tree, helm
from tests.support.deploy.chart_values import values

NOTES = {
    "cpu-demo": """\
Cell demo: StatefulSet, 1 rank(s) a pod, 1 pod(s) a failure domain.

  Clients call      dns:///rel-demo-tokenizer.ns.svc:50051
  or over HTTP      http://rel-demo-tokenizer.ns.svc:8000/v1
  WARNING           nothing is encrypted: tls.insecure is true
  From here         kubectl port-forward --namespace ns service/rel-demo-tokenizer 8000
                    curl http://127.0.0.1:8000/v1/models
  Download          kubectl logs --namespace ns --selector lockstep-cell=demo,app.kubernetes.io/component=model
  One replica more  restarts nothing, up to 7; each further eight, both schedulers
  A roll            lets answers of up to 600 s finish (shutdown.answerSeconds); a longer one is cut

Only pods that networkPolicy.clients selects reach the tokenizers.
Try it: helm test rel --namespace ns --logs
""",
    "nvidia": """\
Cell small: Deployment, 1 rank(s) a pod, 1 pod(s) a failure domain.

  Clients call      dns:///rel-small-tokenizer.ns.svc:50051
  or over HTTP      https://rel-small-tokenizer.ns.svc:8000/v1
  and expect        tokenizer.small.example.org in its certificate
  From here         kubectl port-forward --namespace ns service/rel-small-tokenizer 8000
                    curl --cacert ca.crt --connect-to ::127.0.0.1:8000 https://tokenizer.small.example.org:8000/v1/models
                    with the ca.crt of the secret rel-small-tokenizer-tls
  A roll            lets answers of up to 600 s finish (shutdown.answerSeconds); a longer one is cut
  Scale             deployment/rel-small-worker with an autoscaler of yours, up to 6 replicas

Cell large: StatefulSet, 8 rank(s) a pod, 1 pod(s) a failure domain.

  Clients call      dns:///rel-large-tokenizer.ns.svc:50051
  or over HTTP      https://rel-large-tokenizer.ns.svc:8000/v1
  and expect        tokenizer.large.example.org in its certificate
  From here         kubectl port-forward --namespace ns service/rel-large-tokenizer 8000
                    curl --cacert ca.crt --connect-to ::127.0.0.1:8000 https://tokenizer.large.example.org:8000/v1/models
                    with the ca.crt of the secret rel-large-tokenizer-tls
  One replica more  restarts nothing, up to 7; each further eight, both schedulers
  A roll            lets answers of up to 600 s finish (shutdown.answerSeconds); a longer one is cut

Only pods that networkPolicy.clients selects reach the tokenizers.
Try it: helm test rel --namespace ns --logs
""",
}
OF_GROUPS = """\
Cell main: LeaderWorkerSet, 4 rank(s) a pod, 2 pod(s) a failure domain.

  Clients call      dns:///rel-main-tokenizer.ns.svc:50051
  and expect        tokenizer.main.example.org in its certificate
  One replica more  restarts nothing, up to 7; each further eight, both schedulers
  A roll            lets answers of up to 600 s finish (shutdown.answerSeconds); a longer one is cut

Try it: helm test rel --namespace ns --logs
"""


def notes(*flags: str, given: Tree | None = None) -> str:
    """The notes of an install that is only simulated."""
    text = None if given is None else json.dumps(given)
    output = helm("install", "rel", str(CHART), "-n", "ns", "--dry-run=client", *flags, values=text)
    return output.partition("\nNOTES:\n")[2]


@pytest.mark.parametrize("example", NOTES)
def test_the_notes_of_an_example(example: str) -> None:
    [path] = [each for each in EXAMPLES if each.stem == example]
    assert notes(f"--values={path}") == NOTES[example]


def test_the_notes_say_what_an_upgrade_leaves_to_the_operator() -> None:
    assert "After an upgrade" in notes("--values=-", given=values({"workers": {"tp": 8, "nodes": 2}}))


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        (
            {"workers": {"dp": 2, "ep": True}},
            "Another dp        restarts all ranks together, and both schedulers: an outage as long as a load;",
        ),
        (
            {"scheduler": {"discovery": "static"}},
            "One replica more  restarts every worker and both schedulers (scheduler.discovery static)",
        ),
        ({"workers": {"dp": 8}}, "One replica more  restarts nothing, up to 15; each further eight, both schedulers"),
    ],
    ids=["coupled", "static", "eight"],
)
def test_the_notes_say_what_another_dp_restarts(cell: Tree, said: str) -> None:
    assert said in notes("--values=-", given=values(cell))


def test_the_notes_of_groups_without_http_and_network_policies() -> None:
    cell = {
        "tokenizer": {"http": {"enabled": False}},
        "workers": {"kind": "LeaderWorkerSet", "tp": 8, "nodes": 2},
    }
    given = values(cell, networkPolicy={"enabled": False})
    assert notes("--values=-", given=given) == OF_GROUPS
