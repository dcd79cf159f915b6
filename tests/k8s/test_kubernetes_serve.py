from __future__ import annotations

import re

import pytest

from swiftbatch.scheduler.serve.batches.batch_supervisor import GRACE_SLACK_SECONDS
from swiftbatch.scheduler.serve.batches.batch_webhooks import TRY_SECONDS
from swiftbatch.scheduler.serve.server import END_SECONDS, server_router
from tests.k8s.kubernetes_parts import Object, one, pods, render, validate
from tests.readme.command_lines import options

KEYS_SECRET = "swiftbatch-api-keys"  # which the user makes


@pytest.fixture(params=["serve", "serve-gpu"])
def objects(request: pytest.FixtureRequest) -> list[Object]:
    return render(request.param)


def container_of(objects: list[Object]) -> Object:
    [container] = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    return dict(container)


def given(objects: list[Object]) -> dict[str, object]:
    """Return the options, shell-expanded."""
    container = container_of(objects)
    settings = one(objects, "ConfigMap", container["envFrom"][0]["configMapRef"]["name"])["data"]
    _, _, command = container["args"][0].partition("exec swiftbatch ")  # a shell in front would swallow SIGTERM
    return dict(options(re.sub(r"\$(\w+)", lambda name: settings[name[1]], command).split()))


def test_every_object_has_all_its_fields_and_no_other(objects: list[Object]) -> None:
    kinds = {"Deployment", "Service", "NetworkPolicy", "ServiceAccount", "ConfigMap", "PersistentVolumeClaim"}
    assert {each["kind"] for each in objects} == kinds | {"Namespace"}
    for each in objects:
        validate(each)


def test_the_server_listens_where_the_service_and_the_probes_look_and_asks_for_keys(objects: list[Object]) -> None:
    said, container = given(objects), container_of(objects)
    assert (said["host"], said["is_open"], said["if_busy"]) == ("0.0.0.0", False, "wait")
    assert container["ports"] == [{"name": "http", "containerPort": said["port"]}]
    assert one(objects, "Service")["spec"]["ports"][0]["targetPort"] == "http"
    assert one(objects, "NetworkPolicy")["spec"]["ingress"][0]["ports"] == [{"port": said["port"]}]
    paths = {route.path for route in server_router.routes}  # type: ignore[attr-defined]
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {probe["path"] for probe in probes.values()} == {"/healthz", "/readyz"} <= paths
    assert probes["readiness"]["path"] == "/readyz"
    [mount] = [mount for mount in container["volumeMounts"] if mount["name"] == "keys"]
    assert str(said["api_keys"]).startswith(f"{mount['mountPath']}/")
    volumes = {volume["name"]: volume for volume in one(objects, "Deployment")["spec"]["template"]["spec"]["volumes"]}
    assert volumes["keys"]["secret"]["secretName"] == KEYS_SECRET
    assert "subPath" not in mount  # such a file would never change


def test_the_pod_waits_for_the_end_of_its_server(objects: list[Object]) -> None:
    spec = one(objects, "Deployment")["spec"]
    seconds = float(str(given(objects)["grace_seconds"])) + GRACE_SLACK_SECONDS + END_SECONDS + TRY_SECONDS
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] > seconds
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})  # only one may hold the runs


def test_the_device_is_the_one_that_the_pod_has(objects: list[Object]) -> None:
    has_gpu = "nvidia.com/gpu" in container_of(objects)["resources"]["limits"]
    assert given(objects)["device"] == ("cuda" if has_gpu else "cpu")
    assert container_of(objects)["image"].endswith("-cuda" if has_gpu else "-cpu")


def test_the_pod_is_confined_and_all_that_it_names_is_there(objects: list[Object]) -> None:
    [pod] = pods(objects).values()
    context, container = pod["spec"]["securityContext"], container_of(objects)
    assert (context["runAsNonRoot"], context["runAsUser"], context["fsGroup"]) == (True, 1000, 1000)
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    account = one(objects, "ServiceAccount", pod["spec"]["serviceAccountName"])
    assert account["automountServiceAccountToken"] is False
    names = {each["metadata"]["name"] for each in objects if each["kind"] == "PersistentVolumeClaim"}
    claims = [volume.get("persistentVolumeClaim", {}).get("claimName") for volume in pod["spec"]["volumes"]]
    assert set(claims) - {None} == names
    for kind, where in (("Service", "selector"), ("NetworkPolicy", "podSelector")):
        selector = one(objects, kind)["spec"][where]
        assert selector.get("matchLabels", selector).items() <= pod["metadata"]["labels"].items()
    assert one(objects, "Namespace")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
