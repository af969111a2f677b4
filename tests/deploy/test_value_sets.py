"""Every value set that the schema allows, and whose cross-field rules hold, renders and is valid Kubernetes."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.deploy.chart import LEADER_WORKER_SETS, Tree, containers, pod_templates, render
from tests.support.deploy.chart_values import DIGEST, DOWNLOAD, IMAGES, REGISTRY, TLS
from tests.support.deploy.kubernetes_schemas import find_errors

pytestmark = [pytest.mark.proof, pytest.mark.process]

# Also names and sizes that YAML could take for something else.
NAMES = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,8}[a-z0-9])?", fullmatch=True) | st.sampled_from(
    ["null", "true", "1e3", "0x1f", "no"]
)
SIZES = st.builds("{}{}".format, st.integers(1, 9999), st.sampled_from(["Mi", "Gi", "Ti"]))
CPUS = st.integers(1, 256).map(str) | st.integers(1, 9999).map("{}m".format)
PEERS = [{"ipBlock": {"cidr": "10.0.0.0/8"}}]
SECONDS = st.integers(5, 3000)
RESOURCES = st.fixed_dictionaries({}, optional={"cpu": CPUS, "memory": SIZES})
TEXT = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cc", "Cn", "Co", "Cs", "Zl", "Zp"]), min_size=1, max_size=20
)


def models() -> st.SearchStrategy[Tree]:
    path = st.sampled_from(["m", "a/b-1.5_x"])
    download = st.fixed_dictionaries(
        {**{name: st.just(value) for name, value in DOWNLOAD.items()}, "size": SIZES},
        optional={
            "endpoint": st.just("https://hub.example.org:8443"),
            "proxy": st.sampled_from(["http://proxy.example.org", "http://[fd00::1]:3128"]),
            "tokenSecret": NAMES,
            "caConfigMap": NAMES,
            "nodePath": st.just("/var/lib/models"),
        },
    )
    return st.one_of(
        st.fixed_dictionaries({"pvc": NAMES}, optional={"path": path, "name": TEXT}),
        st.fixed_dictionaries({"hostPath": st.just("/mnt/models")}, optional={"path": path}),
        st.fixed_dictionaries({"image": st.just(f"models/m@{DIGEST}")}),
        st.fixed_dictionaries({"download": download}),
    )


def certificates() -> st.SearchStrategy[Tree]:
    secrets = st.fixed_dictionaries(dict.fromkeys(("tokenizer", "scheduler", "worker"), NAMES))
    return st.one_of(
        st.just({"insecure": True}),
        st.fixed_dictionaries({"trustDomain": st.just("example.org"), "secrets": secrets}),
        st.builds(lambda names: {**TLS, "clientNames": names}, st.lists(st.just("api.example.org"), max_size=1)),
    )


@st.composite
def workers(draw: st.DrawFn, discovery: str) -> Tree:
    """Workers whose nodes share their ranks evenly."""
    tp, dp = draw(st.sampled_from([1, 2, 8])), draw(st.sampled_from([1, 2, 16]))
    ep = draw(st.booleans()) if discovery in ("auto", "static") else False
    groups = dp if ep else 1
    nodes = draw(st.sampled_from([n for n in (1, 2, 4) if groups * tp % n == 0 and (groups == 1 or groups % n == 0)]))
    scaled = discovery != "static" and nodes == 1 and (not ep or dp == 1) and draw(st.booleans())
    resource, device_class = draw(
        st.sampled_from([("amd.com/gpu", ""), ("amd.com/cpx_nps4", ""), ("", "gpu.amd.com"), ("", "")])
    )
    fixed = {
        "tp": tp,
        "dp": dp,
        "ep": ep,
        "nodes": nodes,
        "autoscaling": {"enabled": scaled},
        "gpu": {
            "resource": resource,
            "deviceClass": device_class,
            "perNode": 128,
            "renderGroups": draw(st.lists(st.integers(1, 999), max_size=2, unique=True)),
        },
    }
    options = {
        "kind": st.sampled_from(["auto", "LeaderWorkerSet", "StatefulSet"]),
        "restartPolicy": st.sampled_from(["None", "RecreateGroupAfterStart"]),
        "resources": RESOURCES,
        "sharedMemory": SIZES,
        "cacheSize": SIZES,
        "startupSeconds": SECONDS,
        "env": st.dictionaries(st.sampled_from(["NCCL_DEBUG", "A_1"]), TEXT),
        "settings": st.dictionaries(
            st.sampled_from(["num-threads", "kv-cache-memory-gib", "enforce-eager"]),
            st.booleans() | st.integers() | TEXT,
        ),
        "podTemplate": st.just({"spec": {"nodeSelector": {"disk": "fast"}}}),
    }
    return {**fixed, **draw(st.fixed_dictionaries({}, optional=options))}


@st.composite
def cells(draw: st.DrawFn, name: str) -> Tree:
    discovery = draw(st.sampled_from(["auto", "static", "dns", "kubernetes"]))
    tokenizer = {
        "replicas": st.integers(1, 50),
        "autoscaling": st.builds(
            lambda on, most: {"enabled": on, "maxReplicas": most}, st.booleans(), st.integers(2, 99)
        ),
        "resources": RESOURCES,
        "http": st.fixed_dictionaries({"enabled": st.booleans()}),
        "settings": st.fixed_dictionaries({}, optional={"http-allowed-hosts": TEXT, "cors-origin": TEXT}),
        "otlpEndpoint": st.sampled_from(["", "http://collector.monitoring:4317", "https://otel.example.org:443"]),
        "service": st.builds(
            lambda kind: {"type": kind, "annotations": {"a": "1e3"}},
            st.sampled_from(["", "ClusterIP", "NodePort", "LoadBalancer"]),
        ),
        "grpcRoute": st.just({"parentRefs": [{"name": "gateway", "port": 443}], "hostnames": ["a.example.org"]}),
    }
    tls = draw(certificates())
    of_clients: st.SearchStrategy[Tree] = st.just({}) | st.fixed_dictionaries(
        {"secret": NAMES}, optional={"testSecret": NAMES}
    )
    cell: Tree = {
        "name": name,
        "model": draw(models()),
        "tls": tls,
        "clientKeys": draw(of_clients),
        "clientCa": {} if tls.get("insecure") else draw(of_clients),
        "tokenizer": draw(st.fixed_dictionaries({}, optional=tokenizer)),
        "scheduler": {"discovery": discovery},
        "workers": draw(workers(discovery)),
        "shutdown": {"preStopSeconds": draw(st.integers(0, 60)), "drainSeconds": draw(st.integers(0, 900))},
    }
    return {**cell, **{part: {**cell[part], **image} for part, image in IMAGES.items()}}


def pools(cell: Tree) -> st.SearchStrategy[Tree]:
    picker = st.fixed_dictionaries(
        {"name": st.sampled_from(["picker", "null", "no"]), "port": st.integers(1, 65535)},
        optional={"failureMode": st.sampled_from(["FailClose", "FailOpen"])},
    )
    is_served = cell["tokenizer"].get("http", {}).get("enabled", True)
    protocols = st.sampled_from(["grpc", "http"] if is_served else ["grpc"])
    whole = {"name": st.just(cell["name"]), "cells": st.just([cell["name"]]), "endpointPicker": picker}
    return st.fixed_dictionaries(whole, optional={"protocol": protocols})


@st.composite
def value_sets(draw: st.DrawFn) -> Tree:
    names = draw(st.lists(NAMES, min_size=1, max_size=2, unique=True))
    monitoring = st.fixed_dictionaries(
        {}, optional={key: st.booleans() for key in ("podMonitor", "rules", "dashboards")}
    )
    # Each cell has a model of its own.
    chosen = [draw(cells(name)) for name in names]
    return {
        "cells": chosen,
        "images": REGISTRY,
        "ipFamilies": draw(
            st.permutations(["IPv4", "IPv6"]).flatmap(lambda both: st.sampled_from([[], both[:1], both]))
        ),
        "labels": draw(st.dictionaries(st.sampled_from(["team", "example.org/cost"]), NAMES)),
        "inferencePools": [draw(pools(cell)) for cell in chosen if draw(st.booleans())],
        "monitoring": draw(monitoring),
        "testPrompt": draw(TEXT),
        "fullnameOverride": draw(st.sampled_from(["", "ls"])),
        "networkPolicy": {"enabled": draw(st.booleans()), "operators": PEERS, "endpointPickers": PEERS},
    }


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(value_sets(), st.sampled_from([34, 37]), st.booleans())
def test_a_value_set_that_the_schema_allows_renders_and_is_valid(chosen: Tree, minor: int, has_sets: bool) -> None:
    objects = render(values=chosen, kubernetes=f"1.{minor}.0", apis=[LEADER_WORKER_SETS] if has_sets else [])
    assert find_errors(objects, minor) == []
    for name, template in pod_templates(objects):
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"], name
        assert all(each["securityContext"]["readOnlyRootFilesystem"] for each in containers(pod)), name
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(names) == len(set(names))
