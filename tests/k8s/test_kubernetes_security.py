"""Pods without root, writable root file systems, tokens or foreign traffic."""

from __future__ import annotations

import re

import pytest

from tests.k8s.chart import values_file
from tests.k8s.kubernetes_parts import ROOT, Object, one, pods, render

WRITABLE = {"/tmp", "/home/swiftbatch"}


def is_selected(selector: dict[str, dict[str, str]], pod: Object) -> bool:
    return selector["matchLabels"].items() <= pod["metadata"]["labels"].items()


def assert_is_confined(context: Object, where: str) -> None:
    assert context == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }, where


def test_no_pod_runs_as_root_or_writes_to_its_own_files(objects: list[Object]) -> None:
    found = pods(objects)
    assert len(found) == 1 + 2 + 3 + 3  # the night's; the cluster's; those of job and cron job with their submitters
    for where, pod in found.items():
        context = pod["spec"]["securityContext"]
        assert context["runAsNonRoot"] is True, where
        assert context["runAsUser"] == context["runAsGroup"] == 1000, where
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, where
        for container in pod["spec"]["containers"]:
            assert_is_confined(container["securityContext"], where)
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
            assert all("emptyDir" in volumes[mounts[path]] for path in WRITABLE), where


def test_the_autoscaler_is_confined_too(objects: list[Object]) -> None:
    autoscaler = one(objects, "RayCluster")["spec"]["autoscalerOptions"]
    assert_is_confined(autoscaler["securityContext"], "autoscaler")
    assert {mount["mountPath"] for mount in autoscaler["volumeMounts"]} == WRITABLE
    enforced = one(objects, "Namespace")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    assert enforced == "restricted"


def test_every_container_asks_for_what_it_needs_and_ray_s_are_probed(objects: list[Object]) -> None:
    for where, pod in pods(objects).items():
        for container in pod["spec"]["containers"]:
            resources = container["resources"]
            assert {"cpu", "memory"} <= resources["requests"].keys(), where
            assert resources["limits"]["memory"] == resources["requests"]["memory"] or "Group" not in where
            if "Group" in where:
                for probe in ("livenessProbe", "readinessProbe"):
                    assert "httpGet" in container[probe], where  # the image lacks wget, which KubeRay's default uses


def test_only_the_head_has_a_token_for_kubernetes(objects: list[Object]) -> None:
    accounts = {each["metadata"]["name"]: each for each in objects if each["kind"] == "ServiceAccount"}
    for where, pod in pods(objects).items():
        account = accounts[pod["spec"]["serviceAccountName"]]
        has_token = account.get("automountServiceAccountToken", True)
        assert has_token == ("headGroupSpec" in where), where
    assert not {each["kind"] for each in objects} & {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"}


def test_no_pod_is_left_out_of_the_network_policy(objects: list[Object]) -> None:
    everyone = one(objects, "NetworkPolicy", "swiftbatch")["spec"]
    heads = one(objects, "NetworkPolicy", "swiftbatch-head")["spec"]
    assert everyone["policyTypes"] == heads["policyTypes"] == ["Ingress", "Egress"]
    for where, pod in pods(objects).items():
        assert is_selected(everyone["podSelector"], pod), where
        assert is_selected(heads["podSelector"], pod) == ("headGroupSpec" in where), where
    assert all("from" in rule for policy in (everyone, heads) for rule in policy["ingress"])
    service = one(objects, "Service")["spec"]["selector"]
    assert service.items() <= heads["podSelector"]["matchLabels"].items()


def test_prometheus_reaches_the_driver_and_any_port_that_linux_gives_a_worker(objects: list[Object]) -> None:
    rules = one(objects, "NetworkPolicy", "swiftbatch")["spec"]["ingress"]
    (ports,) = [rule["ports"] for rule in rules if "namespaceSelector" in rule["from"][0]]
    open_ports = {(port["port"], port.get("endPort", port["port"])) for port in ports}
    assert {(9400, 9400), (32768, 60999)} <= open_ports  # net.ipv4.ip_local_port_range by default


def test_the_head_is_never_on_a_spot_node_and_gpu_workers_always_are() -> None:
    spec = one(render("gpu-spot"), "RayCluster")["spec"]
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    head, worker = (
        group["template"]["spec"]["affinity"]["nodeAffinity"][required]["nodeSelectorTerms"]
        for group in (spec["headGroupSpec"], spec["workerGroupSpecs"][0])
    )
    ((refused),) = [term["matchExpressions"] for term in head]
    wanted = [term["matchExpressions"] for term in worker]
    assert all(expression["operator"] == "NotIn" for expression in refused)
    assert [[{**expression, "operator": "In"}] for expression in refused] == wanted


def worker_pods(overlay: str) -> list[Object]:
    return [pod["spec"] for where, pod in pods(render(overlay)).items() if "workerGroupSpecs" in where]


@pytest.mark.parametrize("overlay", ["gpu-spot", "s3"])
def test_all_workers_of_a_run_have_gpus_of_one_product_named_in_one_place(overlay: str) -> None:
    selectors = [spec["nodeSelector"] for spec in worker_pods(overlay)]
    assert len(selectors) == 3
    assert selectors == [selectors[0]] * 3
    (product,) = selectors[0].values()
    assert list(selectors[0]) == ["nvidia.com/gpu.product"]
    written = {path for path in (ROOT / "k8s").rglob("*.yaml") if product in path.read_text(encoding="utf-8")}
    assert written == {values_file(name) for name in ("gpu-spot", "s3")}
    assert not any("nodeSelector" in spec for spec in worker_pods("cpu-demo"))


@pytest.mark.parametrize("overlay", ["gpu-spot", "s3"])
def test_a_gpu_worker_has_the_memory_that_its_process_takes(overlay: str) -> None:
    for spec in worker_pods(overlay):
        (container,) = spec["containers"]
        for kind in ("requests", "limits"):  # equal, so that nobody else's memory is counted on
            gibibytes = re.fullmatch(r"(\d+)Gi", container["resources"][kind]["memory"])
            assert int(gibibytes[1]) * 2**30 >= 24 * 10**9
