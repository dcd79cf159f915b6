"""The server in the chart."""

from __future__ import annotations

import functools

import pytest

from swiftbatch.scheduler.serve.batches.batch_supervisor import GRACE_SLACK_SECONDS
from swiftbatch.scheduler.serve.batches.batch_webhooks import TRY_SECONDS
from swiftbatch.scheduler.serve.server import END_SECONDS, server_router
from tests.k8s.chart import rendered
from tests.k8s.kubernetes_parts import VERSIONS, Object, commands, one, pods, validate, validate_pods
from tests.readme.command_lines import options

HEAD = "swiftbatch-head-svc:6379"
VALUES = (
    "serve.enabled=true",
    "serve.options=--max-running 4",
    "serve.ingress.host=batches.example.org",
    "serve.ingress.className=nginx",
    "serve.ingress.tlsSecret=batches-tls",
    "serve.tmp.size=50Gi",
    "modelCache.type=claim",
    "webhook.secret=hooks",
    "options=--max-worker-hours 9",  # of nights alone
)


@functools.cache
def objects(*more: str) -> list[Object]:
    return rendered(None, *VALUES, *more)


def container() -> Object:
    [found] = one(objects(), "Deployment")["spec"]["template"]["spec"]["containers"]
    return dict(found)


def given() -> dict[str, object]:
    [words] = [words for where, words in commands(objects()).items() if where.startswith("Deployment")]
    assert container()["args"][0].startswith("exec swiftbatch serve ")  # a shell in front would swallow SIGTERM
    return dict(options(words))


@pytest.mark.sample(2)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_has_all_its_fields_and_no_other(version: str) -> None:
    ours = [each for each in objects() if each["metadata"]["name"] == "swiftbatch-serve"]
    kinds = "Deployment Service Ingress NetworkPolicy ServiceAccount PodMonitor ScrapeConfig"
    assert sorted(each["kind"] for each in ours) == sorted(kinds.split())
    validate_pods(objects(), version)
    for each in ours:
        validate(each, version)
    assert not [each for each in rendered() if "serve" in each["metadata"]["name"]]


def test_the_server_listens_where_service_ingress_and_probes_look_and_asks_for_keys() -> None:
    said = given()
    assert (said["host"], said["is_open"], said["if_busy"], said["max_running"]) == ("0.0.0.0", False, "wait", 4)
    assert container()["ports"] == [{"name": "http", "containerPort": said["port"]}]
    assert one(objects(), "Service", "swiftbatch-serve")["spec"]["ports"][0]["targetPort"] == "http"
    [rule] = one(objects(), "NetworkPolicy", "swiftbatch-serve")["spec"]["ingress"]
    assert rule["ports"] == [{"port": said["port"]}]
    ingress = one(objects(), "Ingress")["spec"]
    assert (ingress["ingressClassName"], ingress["rules"][0]["host"]) == ("nginx", "batches.example.org")
    assert ingress["tls"] == [{"hosts": ["batches.example.org"], "secretName": "batches-tls"}]
    service = ingress["rules"][0]["http"]["paths"][0]["backend"]["service"]
    assert service == {"name": "swiftbatch-serve", "port": {"name": "http"}}
    paths = {route.path for route in server_router.routes}
    probes = {name: container()[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {probe["path"] for probe in probes.values()} == {"/healthz", "/readyz"} <= paths
    assert probes["readiness"]["path"] == "/readyz"
    [mount] = [mount for mount in container()["volumeMounts"] if mount["name"] == "keys"]
    assert str(said["api_keys"]).startswith(f"{mount['mountPath']}/")
    assert "subPath" not in mount  # such a file would never change


def test_batches_run_on_the_workers_of_the_cluster_that_stands() -> None:
    said, night = given(), options(next(words for words in commands(objects()).values() if words[0] == "nightly"))
    for name in ("model", "device", "num_threads", "num_workers", "num_slots", "grace_seconds"):
        assert said[name] == night[name], name
    pod = one(objects(), "Deployment")["spec"]["template"]["spec"]
    assert "nvidia.com/gpu" not in str(pod)
    [node] = pod["initContainers"]  # a driver needs a node of its cluster beside it, whose process it can see
    assert pod["shareProcessNamespace"] is True
    assert node["restartPolicy"] == "Always"
    assert said["address"] == HEAD
    assert node["args"][0].endswith(
        f"exec ray start --address {HEAD} --block --num-cpus 0 --num-gpus 0 --object-store-memory 100000000"
    )
    [head] = one(objects(), "RayCluster")["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert {"name": "gcs", "containerPort": 6379} in head["ports"]
    for each in (node, container()):
        token = next(variable for variable in each["env"] if variable["name"] == "RAY_AUTH_TOKEN")
        assert token["valueFrom"]["secretKeyRef"] == {"name": "swiftbatch", "key": "auth_token"}
        assert {"name": "tmp", "mountPath": "/tmp"} in each["volumeMounts"]  # the node's sockets
    with pytest.raises(ValueError, match="nights"):
        rendered(None, "serve.enabled=true", "nights=own")  # on which cluster?


def test_runs_are_where_workers_write_them_too() -> None:
    assert given()["runs_uri"] == "/store/serve"
    volumes = {each["name"]: each for each in one(objects(), "Deployment")["spec"]["template"]["spec"]["volumes"]}
    assert volumes["store"]["persistentVolumeClaim"] == {"claimName": "swiftbatch-store"}
    assert volumes["models"]["persistentVolumeClaim"] == {"claimName": "swiftbatch-models"}
    assert volumes["keys"]["secret"]["secretName"] == "swiftbatch-api-keys"
    assert volumes["tmp"]["emptyDir"] == {"sizeLimit": "50Gi"}
    assert "SWIFTBATCH_WEBHOOK_SECRET" in str(container()["env"])
    found = commands(objects("store.bucket=s3://there"))
    [words] = [words for where, words in found.items() if where.startswith("Deployment")]
    assert options(words)["runs_uri"] == "s3://there/serve"


def test_prometheus_has_a_key_and_finds_server_drivers_and_workers() -> None:
    assert given()["metrics_port"] == 0  # one for each driver
    key = {"credentials": {"name": "swiftbatch-api-keys", "key": "metrics-key"}}
    [point] = one(objects(), "PodMonitor", "swiftbatch-serve")["spec"]["podMetricsEndpoints"]
    assert (point["port"], point["authorization"]) == ("http", key)
    [found] = one(objects(), "ScrapeConfig", "swiftbatch-serve")["spec"]["httpSDConfigs"]
    assert (found["url"], found["authorization"]) == ("http://swiftbatch-serve.swiftbatch.svc/sd", key)


def test_the_pod_waits_for_the_end_of_its_server_and_is_not_moved() -> None:
    spec = one(objects(), "Deployment")["spec"]
    seconds = float(str(given()["grace_seconds"])) + GRACE_SLACK_SECONDS + END_SECONDS + TRY_SECONDS
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] > seconds
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})  # only one may hold the runs
    metadata = spec["template"]["metadata"]
    assert metadata["annotations"]["karpenter.sh/do-not-disrupt"] == "true"
    selector = one(objects(), "PodDisruptionBudget")["spec"]["selector"]
    [expression] = selector["matchExpressions"]
    assert selector["matchLabels"].items() <= metadata["labels"].items()
    assert metadata["labels"][expression["key"]] in expression["values"]


def test_the_pod_is_confined_and_all_that_it_names_is_there() -> None:
    [pod] = [pod for where, pod in pods(objects()).items() if where.startswith("Deployment")]
    context = pod["spec"]["securityContext"]
    assert (context["runAsNonRoot"], context["runAsUser"], context["fsGroup"]) == (True, 1000, 1000)
    for each in (*pod["spec"]["initContainers"], container()):
        assert each["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    account = one(objects(), "ServiceAccount", pod["spec"]["serviceAccountName"])
    assert account["automountServiceAccountToken"] is False
    names = {each["metadata"]["name"] for each in objects() if each["kind"] == "PersistentVolumeClaim"}
    claims = [volume.get("persistentVolumeClaim", {}).get("claimName") for volume in pod["spec"]["volumes"]]
    assert set(claims) - {None} == names
    for kind, where in (("Service", "selector"), ("NetworkPolicy", "podSelector")):
        selector = one(objects(), kind, "swiftbatch-serve")["spec"][where]
        assert selector.get("matchLabels", selector).items() <= pod["metadata"]["labels"].items()
