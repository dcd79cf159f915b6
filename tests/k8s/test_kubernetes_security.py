"""What a pod may do: no root, no writing but to its volumes, no token, no talk with strangers; and the image for it."""

from __future__ import annotations

import fnmatch
import re

import pytest

from tests.k8s.kubernetes_parts import OVERLAYS, ROOT, Object, one, pods, render

WRITABLE = {"/tmp", "/home/swiftbatch"}
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


@pytest.fixture(params=OVERLAYS)
def objects(request: pytest.FixtureRequest) -> list[Object]:
    return render(request.param)


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
                    assert "httpGet" in container[probe], where  # the image has no wget, which KubeRay's own would use


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
    assert {(9400, 9400), (32768, 60999)} <= open_ports  # net.ipv4.ip_local_port_range, unless it was changed


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


@pytest.mark.parametrize("stage", ["cpu", "cuda"])
def test_the_image_has_a_target_for_each_kind_of_worker(stage: str) -> None:
    assert re.search(rf"^FROM \S+ AS {stage}$", DOCKERFILE, re.MULTILINE)
    overlay = {"cpu": "cpu-demo", "cuda": "s3"}[stage]
    for where, pod in pods(render(overlay)).items():
        for container in pod["spec"]["containers"]:
            assert container["image"].endswith(f"-{stage}"), where


def test_the_image_s_user_and_home_are_those_of_the_pods() -> None:
    assert re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE) == ["1000:1000"] * 2
    assert re.search(r"\bHOME=/home/swiftbatch$", DOCKERFILE, re.MULTILINE)


def test_what_the_image_copies_is_there_and_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split("\n")
    assert ignored[0] == "*"  # all but what is named, so that no secret and no run gets in
    let_in = {line[1:] for line in ignored if line.startswith("!")}
    sources = [word for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.MULTILINE) for word in line.split()[:-1]]
    names = {source.rstrip("/") for source in sources if not source.startswith("--")}
    assert names == let_in
    assert all((ROOT / name).exists() for name in names)
    left_out = [line for line in ignored if line and not line.startswith(("!", "#", "*"))]
    assert not any(fnmatch.fnmatch("worker/embedded/model.safetensors", pattern) for pattern in left_out)
