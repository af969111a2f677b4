"""What the chart makes of a cell: objects, addresses, GPUs, volumes, certificates."""

from __future__ import annotations

import pytest
import yaml

from tests.support.clients.endpoint_picker import CONFIGS, read_config, read_engine
from tests.support.deploy.chart import (
    CHART,
    LEADER_WORKER_SETS,
    Tree,
    containers,
    find,
    pod_templates,
    render,
    rendered_examples,
)
from tests.support.deploy.chart_values import DIGEST, TLS, downloaded_values, pools, values, workers
from tests.support.deploy.workloads import args_of, flag, spec_of, template_of

SETS = [LEADER_WORKER_SETS]
INSECURE = {"trustDomain": "", "issuer": {}, "insecure": True}
ZONE = "topology.kubernetes.io/zone"
GROUP_INDEX = "leaderworkerset.sigs.k8s.io/group-index"


def dialled(objects: list[Tree]) -> list[str]:
    return flag(args_of(objects, "StatefulSet", "-scheduler"), "workers").split(",")


def test_a_group_of_each_domain_where_the_cluster_has_leader_worker_sets() -> None:
    (found,) = find(render(values=workers(tp=8, dp=3, nodes=2), apis=SETS), "LeaderWorkerSet")
    assert found["spec"]["replicas"] == 3
    assert found["spec"]["leaderWorkerTemplate"]["size"] == 2
    assert found["spec"]["leaderWorkerTemplate"]["restartPolicy"] == "None"


def test_a_stateful_set_of_each_domain_where_it_has_none() -> None:
    found = find(render(values=workers(tp=8, dp=3, nodes=2)), "StatefulSet")
    assert [
        (each["metadata"]["name"], each["spec"]["replicas"]) for each in found if "-worker" in each["metadata"]["name"]
    ] == [
        ("rel-main-worker-0", 2),
        ("rel-main-worker-1", 2),
        ("rel-main-worker-2", 2),
    ]


def test_domains_of_one_pod_are_one_stateful_set_that_rolls() -> None:
    objects = render(values=values({"scheduler": {"discovery": "static"}, "workers": {"tp": 8, "dp": 3}}))
    (found,) = [each for each in find(objects, "StatefulSet") if "-worker" in each["metadata"]["name"]]
    assert (found["metadata"]["name"], found["spec"]["replicas"]) == ("rel-main-worker", 3)
    # One pod after the other, which `helm upgrade --wait` waits for.
    assert found["spec"]["updateStrategy"] == {"type": "RollingUpdate"}
    args = args_of(objects, "StatefulSet", "-worker")
    assert flag(args, "dp-rank") == "$(GROUP_INDEX)"
    assert not [arg for arg in args if arg.startswith(("--nodes", "--node-rank", "--first-node"))]
    assert dialled(objects) == [f"rel-main-worker-{domain}.rel-main-worker:50053" for domain in range(3)]
    # Whose pods have these names.
    (service,) = find(objects, "Service", found["spec"]["serviceName"])
    assert service["spec"]["selector"].items() <= found["spec"]["template"]["metadata"]["labels"].items()
    assert service["spec"]["publishNotReadyAddresses"]


def test_a_coupled_cell_in_one_pod_rolls_too() -> None:
    (found,) = find(render(values=workers(dp=8, ep=True)), "StatefulSet", "-worker")
    assert (found["spec"]["replicas"], found["spec"]["updateStrategy"]) == (1, {"type": "RollingUpdate"})


def test_domains_of_several_pods_are_left_to_the_operator() -> None:
    found = find(render(values=workers(tp=8, dp=2, nodes=2)), "StatefulSet", "-worker-1")
    assert [each["spec"]["updateStrategy"] for each in found] == [{"type": "OnDelete"}]


@pytest.mark.parametrize(
    ("kind", "name"), [("Deployment", "-tokenizer"), ("StatefulSet", "-scheduler"), ("LeaderWorkerSet", "-worker")]
)
def test_replicas_are_on_different_nodes_and_in_different_zones_where_that_can_be(kind: str, name: str) -> None:
    objects = render(values=workers(tp=4, dp=2), apis=SETS)
    template = template_of(objects, kind, name)
    assert "affinity" not in template["spec"]
    spread = template["spec"]["topologySpreadConstraints"]
    assert [each["topologyKey"] for each in spread] == ["kubernetes.io/hostname", ZONE]
    for each in spread:
        assert (each["maxSkew"], each["whenUnsatisfiable"]) == (1, "ScheduleAnyway")
        assert each["labelSelector"]["matchLabels"] == template["metadata"]["labels"]


@pytest.mark.parametrize(
    ("dp", "apis", "group", "keys"),
    [
        (2, [], {"lockstep-domain": "1"}, None),
        (1, SETS, {}, [GROUP_INDEX]),
        (2, SETS, {}, [GROUP_INDEX]),
    ],
    ids=["StatefulSets", "one group", "two groups"],
)
def test_a_domains_pods_are_in_one_zone_where_that_can_be(
    dp: int, apis: list[str], group: dict[str, str], keys: list[str] | None
) -> None:
    objects = render(values=workers(tp=8, dp=dp, nodes=2), apis=apis)
    kind, name = ("LeaderWorkerSet", "-worker") if apis else ("StatefulSet", "-worker-1")
    template = template_of(objects, kind, name)
    assert "topologySpreadConstraints" not in template["spec"]
    (preferred,) = template["spec"]["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    term = preferred["podAffinityTerm"]
    assert term["topologyKey"] == ZONE
    assert term.get("matchLabelKeys") == keys
    # The controller of a LeaderWorkerSet adds the label of the group.
    assert term["labelSelector"]["matchLabels"] == template["metadata"]["labels"] | group


def test_before_kubernetes_1_31_groups_of_a_set_have_no_preference() -> None:
    objects = render(values=workers(tp=8, dp=2, nodes=2), apis=SETS, kubernetes="1.30.0")
    assert "affinity" not in spec_of(objects, "LeaderWorkerSet", "-worker")


@pytest.mark.parametrize(("kind", "apis"), [("StatefulSet", SETS), ("LeaderWorkerSet", [])])
def test_the_kind_can_be_given(kind: str, apis: list[str]) -> None:
    found = find(render(values=workers(kind=kind), apis=apis), kind)
    assert any("-worker" in each["metadata"]["name"] for each in found)


def test_a_coupled_cell_is_one_domain() -> None:
    objects = render(values=workers(tp=2, dp=4, ep=True, nodes=2), apis=SETS)
    (found,) = find(objects, "LeaderWorkerSet")
    args = args_of(objects, "LeaderWorkerSet", "-worker")
    assert (found["spec"]["replicas"], found["spec"]["leaderWorkerTemplate"]["size"]) == (1, 2)
    assert {"--ep", "--tp=2", "--dp=4", "--ranks-per-node=4", "--nodes=2"} <= set(args)
    assert not [arg for arg in args if arg.startswith("--dp-rank")]
    assert "--coupled" in args_of(objects, "StatefulSet", "-scheduler")


def test_one_replica_with_expert_parallelism_is_not_coupled() -> None:
    assert "--coupled" not in args_of(render(values=workers(tp=8, ep=True)), "StatefulSet", "-scheduler")


def test_the_scheduler_dials_the_first_rank_of_each_group() -> None:
    listed = values({"scheduler": {"discovery": "static"}, "workers": {"tp": 4, "dp": 2, "nodes": 2}})
    assert dialled(render(values=listed, apis=SETS)) == [
        "rel-main-worker-0.rel-main-worker:50053",
        "rel-main-worker-1.rel-main-worker:50053",
    ]
    assert dialled(render(values=listed)) == [
        "rel-main-worker-0-0.rel-main-worker:50053",
        "rel-main-worker-1-0.rel-main-worker:50053",
    ]
    assert dialled(render(values=workers(tp=2, dp=4, ep=True, nodes=2), apis=SETS)) == [
        "rel-main-worker-0.rel-main-worker:50053",
        "rel-main-worker-0.rel-main-worker:50055",
        "rel-main-worker-0-1.rel-main-worker:50053",
        "rel-main-worker-0-1.rel-main-worker:50055",
    ]


def test_tokenizers_dial_both_schedulers_by_their_own_names() -> None:
    objects = render(values=values())
    assert flag(args_of(objects, "Deployment", "-tokenizer"), "scheduler").split(",") == [
        "rel-main-scheduler-0.rel-main-scheduler:50054",
        "rel-main-scheduler-1.rel-main-scheduler:50054",
    ]
    (stateful_set,) = find(objects, "StatefulSet", "-scheduler")
    (service,) = find(objects, "Service", "-scheduler")
    assert stateful_set["spec"]["replicas"] == 2
    assert stateful_set["spec"]["serviceName"] == service["metadata"]["name"]
    assert service["spec"]["publishNotReadyAddresses"]


def test_a_group_knows_its_rank_its_node_and_its_first_node() -> None:
    listed = values({"scheduler": {"discovery": "static"}, "workers": {"tp": 4, "dp": 2, "nodes": 2}})
    args = args_of(render(values=listed, apis=SETS), "LeaderWorkerSet", "-worker")
    assert flag(args, "dp-rank") == "$(GROUP_INDEX)"
    assert flag(args, "node-rank") == "$(LWS_WORKER_INDEX)"
    assert flag(args, "first-node") == "$(LWS_LEADER_ADDRESS)"
    args = args_of(render(values=listed), "StatefulSet", "-worker-1")
    assert flag(args, "dp-rank") == "1"
    assert flag(args, "node-rank") == "$(NODE_RANK)"
    assert flag(args, "first-node") == "rel-main-worker-1-0.rel-main-worker"


def test_an_image_can_be_named_by_its_tag_or_with_its_registry() -> None:
    image = {"name": "registry.example.com:5000/team/worker", "digest": "", "tag": "0.1.0"}
    cell = {part: {"image": image} for part in ("tokenizer", "scheduler", "workers")}
    for name, template in pod_templates(render(values=values(cell, images={}))):
        for container in containers(template["spec"]):
            assert container["image"] == "registry.example.com:5000/team/worker:0.1.0", name


def test_nodes_that_pull_nothing_need_no_registry() -> None:
    (container,) = spec_of(render(values=values(images={"pullPolicy": "Never"})), "StatefulSet", "-worker")[
        "containers"
    ]
    assert container["image"] == f"lockstep-worker-rocm@{DIGEST}"


def test_labels_are_on_every_object_and_every_pod() -> None:
    labels = {"team": "a", "example.org/cost-centre": "7"}
    extra = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "more", "labels": {"own": "b"}}}
    given = downloaded_values(labels=labels, extraObjects=[extra], monitoring={"podMonitor": True, "rules": True})
    objects = render(values=given)
    assert {"ConfigMap", "Job", "Pod", "NetworkPolicy", "PersistentVolumeClaim"} <= {each["kind"] for each in objects}
    for each in objects:
        assert labels.items() <= each["metadata"]["labels"].items(), each["metadata"]["name"]
    for name, template in pod_templates(objects):
        assert labels.items() <= template["metadata"]["labels"].items(), name
    (more,) = find(objects, "ConfigMap", "more")
    assert more["metadata"]["labels"]["own"] == "b"


def test_a_label_selects_nothing() -> None:
    for each in render(values=values(labels={"team": "a"})):
        selector = each.get("spec", {}).get("selector", {})
        assert "team" not in selector.get("matchLabels", selector), each["metadata"]["name"]


def test_accounts_have_their_annotations() -> None:
    annotations = {"example.org/role": "reader"}
    cell = {"scheduler": {"discovery": "kubernetes"}, "serviceAccount": {"annotations": annotations}}
    accounts = find(render(values=values(cell)), "ServiceAccount")
    assert [each["metadata"]["annotations"] for each in accounts] == [annotations] * 2


def test_pod_templates_are_of_jobs_and_test_pods_too() -> None:
    patch = {"metadata": {"annotations": {"a": "b"}}, "spec": {"nodeSelector": {"disk": "fast"}}}
    given = downloaded_values({"model": {"podTemplate": patch}}, testPodTemplate=patch)
    found = {
        name: template for name, template in pod_templates(render(values=given)) if name.startswith(("Job", "Pod"))
    }
    assert len(found) == 3
    for name, template in found.items():
        assert template["spec"]["nodeSelector"] == {"disk": "fast"}, name
        assert template["metadata"]["annotations"]["a"] == "b", name
        assert template["spec"]["restartPolicy"] == "Never", name


def test_pods_ask_for_the_disk_of_their_volumes() -> None:
    objects = render(values=workers(cacheSize="10Gi"))
    (worker,) = spec_of(objects, "StatefulSet", "-worker")["containers"]
    assert worker["resources"]["requests"]["ephemeral-storage"] == f"{15 * 1024}Mi"
    for name, template in pod_templates(objects):
        for container in containers(template["spec"]):
            assert "ephemeral-storage" in container["resources"]["requests"], name


def test_every_variable_in_a_flag_is_set() -> None:
    injected = {"LWS_LEADER_ADDRESS", "LWS_WORKER_INDEX"}
    for name, objects in rendered_examples().items():
        for kind in ("StatefulSet", "Deployment", "LeaderWorkerSet"):
            for each in find(objects, kind):
                pod = spec_of(objects, kind, each["metadata"]["name"])
                given = {variable["name"] for variable in pod["containers"][0].get("env", [])}
                known = given | injected if kind == "LeaderWorkerSet" else given
                used = {arg.partition("$(")[2].rstrip(")") for arg in pod["containers"][0]["args"] if "$(" in arg}
                assert used <= known, name


def test_an_autoscaled_cell_is_a_deployment_whose_number_begins_with_dp() -> None:
    objects = render(
        values=values(
            {
                "scheduler": {"discovery": "kubernetes"},
                "workers": {"dp": 3, "autoscaling": {"enabled": True, "maxReplicas": 5}},
            }
        )
    )
    (deployment,) = find(objects, "Deployment", "-worker")
    assert deployment["spec"]["replicas"] == 3
    assert not [arg for arg in args_of(objects, "Deployment", "-worker") if arg.startswith("--dp-rank")]
    args = args_of(objects, "StatefulSet", "-scheduler")
    (service,) = find(objects, "Service", "-groups")
    assert flag(args, "discovery-service") == service["metadata"]["name"]
    assert flag(args, "discovery-port") in {port["name"] for port in service["spec"]["ports"]}
    assert flag(args, "max-dp") == "5"
    assert not [arg for arg in args if arg.startswith("--workers")]


@pytest.mark.parametrize(
    ("apis", "selected"),
    [(SETS, {"leaderworkerset.sigs.k8s.io/worker-index": "0"}), ([], {"apps.kubernetes.io/pod-index": "0"})],
)
def test_discovery_finds_the_first_pod_of_each_domain(apis: list[str], selected: dict[str, str]) -> None:
    cell = {"scheduler": {"discovery": "dns"}, "workers": {"tp": 4, "dp": 2, "nodes": 2}}
    (service,) = find(render(values=values(cell), apis=apis), "Service", "-groups")
    assert selected.items() <= service["spec"]["selector"].items()


def test_the_example_of_an_autoscaler_scales_the_workers_within_their_places() -> None:
    objects = render(CHART / "examples" / "keda.yaml")
    (scaled,) = find(objects, "ScaledObject")
    (deployment,) = find(objects, "Deployment", "-worker")
    target = scaled["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", deployment["metadata"]["name"])
    places = flag(args_of(objects, "StatefulSet", "-scheduler"), "max-dp")
    assert scaled["spec"]["maxReplicaCount"] == int(places)
    assert 'cell="chat"' in scaled["spec"]["triggers"][0]["metadata"]["query"]
    assert deployment["metadata"]["labels"]["lockstep-cell"] == "chat"


def test_autoscaled_tokenizers_begin_with_the_fewest() -> None:
    objects = render(values=values({"tokenizer": {"autoscaling": {"enabled": True, "minReplicas": 3}}}))
    (deployment,) = find(objects, "Deployment", "-tokenizer")
    (scaler,) = find(objects, "HorizontalPodAutoscaler")
    assert deployment["spec"]["replicas"] == scaler["spec"]["minReplicas"] == 3
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert not find(render(values=values()), "HorizontalPodAutoscaler")


@pytest.mark.parametrize("resource", ["amd.com/gpu", "nvidia.com/gpu", "amd.com/cpx_nps4"])
def test_one_container_asks_for_all_gpus_of_its_ranks(resource: str) -> None:
    objects = render(values=workers(tp=8, nodes=2, gpu={"resource": resource}), apis=SETS)
    pod = spec_of(objects, "LeaderWorkerSet", "-worker")
    assert pod["containers"][0]["resources"]["limits"][resource] == 4
    assert pod["tolerations"] == [{"key": resource, "operator": "Exists", "effect": "NoSchedule"}]
    assert "--worker.device=cuda" in pod["containers"][0]["args"]


def test_a_worker_on_a_cpu_asks_for_no_gpu() -> None:
    pod = spec_of(render(values=workers(gpu={"resource": ""})), "StatefulSet", "-worker")
    assert pod["containers"][0]["resources"]["limits"].keys() == {"cpu", "memory", "ephemeral-storage"}
    assert "tolerations" not in pod
    assert "--worker.device=cpu" in pod["containers"][0]["args"]


def test_gpus_can_come_by_dynamic_resource_allocation() -> None:
    objects = render(values=workers(tp=4, gpu={"resource": "", "deviceClass": "gpu.amd.com"}))
    (template,) = find(objects, "ResourceClaimTemplate")
    (request,) = template["spec"]["spec"]["devices"]["requests"]
    pod = spec_of(objects, "StatefulSet", "-worker")
    assert request["exactly"]["count"] == 4
    assert pod["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": template["metadata"]["name"]}]
    assert pod["containers"][0]["resources"]["claims"] == [{"name": "gpu"}]
    assert "--worker.device=cuda" in pod["containers"][0]["args"]


def test_the_process_joins_the_groups_of_render_devices() -> None:
    pod = spec_of(render(values=workers(gpu={"renderGroups": [44, 109]})), "StatefulSet", "-worker")
    assert pod["securityContext"]["supplementalGroups"] == [44, 109]
    assert pod["securityContext"]["runAsNonRoot"]


def test_shared_memory_is_part_of_the_memory_limit() -> None:
    objects = render(values=workers(resources={"memory": "64Gi"}, sharedMemory="512Mi"))
    pod = spec_of(objects, "StatefulSet", "-worker")
    assert pod["containers"][0]["resources"]["limits"]["memory"] == f"{64 * 1024 + 512}Mi"
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "512Mi"}} in pod["volumes"]


def test_each_role_has_a_certificate_with_its_names() -> None:
    certificates = {each["metadata"]["name"]: each["spec"] for each in find(render(values=values()), "Certificate")}
    assert certificates.keys() == {f"rel-main-{role}" for role in ("tokenizer", "scheduler", "worker", "operator")}
    for role in ("tokenizer", "scheduler", "worker", "operator"):
        spec = certificates[f"rel-main-{role}"]
        assert spec["dnsNames"][0] == f"{role}.main.example.org"
        assert spec["uris"] == [f"spiffe://main.example.org/{role}"]
        assert {"server auth", "client auth"} <= set(spec["usages"])


def test_each_pod_mounts_its_own_role_s_certificate_and_the_test_no_key() -> None:
    given = {
        "trustDomain": "example.org",
        "issuer": {},
        "secrets": {role: f"my-{role}" for role in ("tokenizer", "scheduler", "worker")},
    }
    for tls, name in ((TLS, "rel-main-{}-tls"), (given, "my-{}")):
        objects = render(values=values({"tls": tls}))
        for kind, role in (("Deployment", "tokenizer"), ("StatefulSet", "scheduler"), ("StatefulSet", "worker")):
            pod = spec_of(objects, kind, f"-{role}")
            secrets = [volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume]
            assert secrets == [name.format(role)]
        for test in find(objects, "Pod"):
            assert test["spec"]["volumes"][0]["secret"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]
    assert not find(render(values=values({"tls": given})), "Certificate")


def test_without_tls_every_port_says_that_it_is_insecure() -> None:
    objects = render(values=values({"tls": INSECURE}))
    for kind, name in (("Deployment", "-tokenizer"), ("StatefulSet", "-scheduler"), ("StatefulSet", "-worker")):
        args = args_of(objects, kind, name)
        assert flag(args, "insecure-bind").startswith("0.0.0.0:")
        assert not [arg for arg in args if arg.startswith(("--tls", "--listen", "--cell-listen", "--http-listen"))]


def test_cells_share_no_object_and_select_no_pod_of_each_other() -> None:
    objects = [each for name, objects in rendered_examples().items() if name.startswith("nvidia") for each in objects]
    for each in find(objects, "Service"):
        assert each["spec"]["selector"]["lockstep-cell"] in each["metadata"]["name"]


def test_before_kubernetes_1_30_the_hook_is_a_command() -> None:
    (container,) = spec_of(render(values=values(), kubernetes="1.29.0"), "StatefulSet", "-scheduler")["containers"]
    assert container["lifecycle"]["preStop"]["exec"]["command"][0] == "python3"


def test_upgrading_the_chart_restarts_no_pod_by_itself() -> None:
    for objects in rendered_examples().values():
        for kind in ("StatefulSet", "Deployment"):
            for each in find(objects, kind):
                labels = each["spec"]["template"]["metadata"]["labels"]
                assert not {"helm.sh/chart", "app.kubernetes.io/version"} & labels.keys()


def test_monitoring_is_made_on_request() -> None:
    objects = render(
        values=values(monitoring={"podMonitor": True, "rules": True, "dashboards": True, "labels": {"team": "a"}})
    )
    (monitor,) = find(objects, "PodMonitor")
    (rule,) = find(objects, "PrometheusRule")
    (dashboards,) = find(objects, "ConfigMap", "-dashboards")
    assert [each["port"] for each in monitor["spec"]["podMetricsEndpoints"]] == ["manage", "rank-0"]
    assert rule["spec"]["groups"]
    assert dashboards["data"].keys() == {path.name for path in (CHART / "files" / "dashboards").iterdir()}
    assert all(each["metadata"]["labels"]["team"] == "a" for each in (monitor, rule, dashboards))
    assert not find(render(values=values()), "PodMonitor")


@pytest.mark.parametrize(
    ("protocol", "port", "app_protocol"),
    [("grpc", "grpc", "kubernetes.io/h2c"), ("http", "http", "http"), (None, "grpc", "kubernetes.io/h2c")],
)
def test_an_inference_pool_selects_the_tokenizers_of_its_cells_and_no_other_pod(
    protocol: str | None, port: str, app_protocol: str
) -> None:
    given = {} if protocol is None else {"protocol": protocol}
    objects = render(values=pools({"cells": ["main", "b"], **given}, cells=[{"name": "b"}, {"name": "c"}]))
    (pool,) = find(objects, "InferencePool")
    config = read_config(port)
    selector = pool["spec"]["selector"]["matchLabels"].items()
    chosen = {name: pod for name, pod in pod_templates(objects) if selector <= pod["metadata"]["labels"].items()}
    assert chosen.keys() == {"Deployment/rel-main-tokenizer", "Deployment/rel-b-tokenizer"}
    for pod in chosen.values():
        ports = {each["name"]: each["containerPort"] for each in pod["spec"]["containers"][0]["ports"]}
        assert [{"number": ports[port]}] == pool["spec"]["targetPorts"]
        assert ports["manage"] == config["metrics-data-source"]["port"]
        # How the endpoint picker knows that the metrics are ours.
        assert pod["metadata"]["labels"]["llm-d.ai/engine-type"] == read_engine(port)["name"]
    assert pool["spec"]["appProtocol"] == app_protocol
    assert pool["spec"]["endpointPickerRef"] == {"name": "picker", "port": {"number": 9002}, "failureMode": "FailClose"}


def test_pickers_of_both_protocols_read_the_same_metrics_and_know_their_plugins() -> None:
    grpc, http = read_config("grpc"), read_config("http")
    shared = grpc.keys() & http.keys()
    assert {name: grpc[name] for name in shared} == {name: http[name] for name in shared}
    assert http.keys() - shared == {"openai-parser", "prefix-cache-scorer"}
    for path in CONFIGS.values():
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        (profile,), (source,) = config["schedulingProfiles"], config["dataLayer"]["sources"]
        parsers = config["requestHandler"]["parsers"]
        used = [*profile["plugins"], *parsers, source, *source["extractors"]]
        assert sorted(each["pluginRef"] for each in used) == sorted(each["type"] for each in config["plugins"])
        # It takes every path, so no parser after it is asked.
        assert parsers[-1] == {"pluginRef": "passthrough-parser"}


def test_a_cell_is_in_a_pool_of_each_protocol() -> None:
    objects = render(values=pools({"name": "calls"}, {"name": "chats", "protocol": "http"}))
    (pod,) = (pod for name, pod in pod_templates(objects) if name.endswith("-tokenizer"))
    labels = pod["metadata"]["labels"].items()
    selectors = {
        each["metadata"]["name"]: each["spec"]["selector"]["matchLabels"] for each in find(objects, "InferencePool")
    }
    assert selectors.keys() == {"rel-calls", "rel-chats"}
    assert all(selector.items() <= labels for selector in selectors.values())
    assert not selectors["rel-calls"].items() <= selectors["rel-chats"].items()


def test_cells_of_one_name_over_http_are_in_one_pool_of_http() -> None:
    cell = {"name": "b", "model": {"pvc": "models", "name": "other"}}
    names = {"tokenizer": {"settings": {"served-model-name": "chat"}}}
    defaults = {"cellDefaults": names}
    objects = render(values=pools({"cells": ["main", "b"], "protocol": "http"}, cells=[cell], **defaults))
    assert len(find(objects, "InferencePool")) == 1


def test_without_pools_there_is_nothing_of_them() -> None:
    objects = render(values=values())
    assert not find(objects, "InferencePool")
    assert not [name for name, pod in pod_templates(objects) if "llm-d.ai/engine-type" in pod["metadata"]["labels"]]


@pytest.mark.parametrize(
    ("tls", "flag_name", "scheme"), [(INSECURE, "insecure-http-bind", "http"), (TLS, "http-listen", "https")]
)
def test_tokenizers_serve_http_where_they_serve_grpc(tls: Tree, flag_name: str, scheme: str) -> None:
    objects = render(values=values({"tls": tls}))
    pod = spec_of(objects, "Deployment", "-tokenizer")
    (service,) = find(objects, "Service", "-tokenizer")
    port = next(each for each in service["spec"]["ports"] if each["name"] == "http")
    assert (port["port"], port["targetPort"], port["appProtocol"]) == (8000, "http", scheme)
    assert {"name": "http", "containerPort": 8000} in pod["containers"][0]["ports"]
    assert flag(args_of(objects, "Deployment", "-tokenizer"), flag_name) == "0.0.0.0:8000"


def test_without_http_there_is_nothing_of_it() -> None:
    objects = render(values=values({"tokenizer": {"http": {"enabled": False}}}))
    (service,) = find(objects, "Service", "-tokenizer")
    pod = spec_of(objects, "Deployment", "-tokenizer")
    assert [each["name"] for each in service["spec"]["ports"]] == ["grpc"]
    assert [each["name"] for each in pod["containers"][0]["ports"]] == ["grpc", "manage"]
    assert not [arg for arg in args_of(objects, "Deployment", "-tokenizer") if "http" in arg]
    assert [each["metadata"]["name"] for each in find(objects, "Pod")] == ["rel-main-test"]


def test_the_probes_are_those_of_the_management_port_with_http_and_without() -> None:
    probed = []
    for is_served in (True, False):
        cell = {"tokenizer": {"http": {"enabled": is_served}}}
        (container,) = spec_of(render(values=values(cell)), "Deployment", "-tokenizer")["containers"]
        probed.append([container[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness")])
    assert probed[0] == probed[1]
    assert {each["httpGet"]["port"] for each in probed[0]} == {"manage"}


def test_the_test_pods_generate_with_the_client_and_over_http() -> None:
    objects = render(values=values(testPrompt="Once: upon a time"))
    generating, asking = (find(objects, "Pod", end)[0] for end in ("-test", "-test-http"))
    (container,) = containers(generating["spec"])
    assert container["command"] == ["lockstep", "generate"]
    (asker,) = containers(asking["spec"])
    assert asker["command"] == ["python3", "-c", (CHART / "files" / "ask_http.py").read_text(encoding="utf-8")]
    (service,) = find(objects, "Service", "-tokenizer")
    assert flag(asker["args"], "target") == f"{service['metadata']['name']}.ns.svc:8000"
    for pod in (generating, asking):
        assert containers(pod["spec"])[0]["args"][0] == "Once: upon a time"
        assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"


def test_the_test_pods_of_an_embedder_ask_for_a_vector() -> None:
    objects = render(values=values({"workers": {"settings": {"task": "embed"}}}))
    generating, asking = (find(objects, "Pod", end)[0] for end in ("-test", "-test-http"))
    (embedder,), (asker,) = containers(generating["spec"]), containers(asking["spec"])
    assert embedder["command"] == ["lockstep", "embed"]
    assert "--embed" in asker["args"]
    assert not [arg for arg in (*embedder["args"], *asker["args"]) if arg.startswith("--max-tokens")]
    assert "--worker.task=embed" in str(objects)


def test_the_test_over_http_is_for_a_host_that_is_allowed() -> None:
    cell = {"tokenizer": {"settings": {"http-allowed-hosts": "api.example.org,example.org"}}}
    (pod,) = find(render(values=values(cell)), "Pod", "-test-http")
    assert flag(pod["spec"]["containers"][0]["args"], "host") == "api.example.org"
