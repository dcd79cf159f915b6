"""Each value of the chart changes its objects."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.k8s.chart import CHART, rendered
from tests.k8s.kubernetes_parts import (
    VERSIONS,
    Object,
    commands,
    one,
    pods,
    ray_containers,
    settings,
    validate,
    validate_pods,
)
from tests.readme.command_lines import options, page

SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
DIGEST = f"sha256:{'0' * 64}"
GIVEN: dict[str, Any] = yaml.safe_load(f"""
image: {{ digest: "{DIGEST}", pullPolicy: Always }}
podAnnotations: {{ example.com/team: answers }}
serviceAccount: {{ annotations: {{ eks.amazonaws.com/role-arn: role }} }}
slots: 7
head:
  cpu: "3"
  memory: 9Gi
  ephemeralStorage: 11Gi
  home: {{ size: 12Gi }}
  nodeSelector: {{ pool: system }}
  affinity: {{ podAntiAffinity: {{}} }}
  tolerations: [{{ key: system, operator: Exists }}]
workers:
  cpu: 5
  memory: 64Gi
  ephemeralStorage: 120Gi
  home: {{ type: ephemeral, size: 200Gi, storageClassName: fast }}
  gpus: 2
  gpuProduct: NVIDIA-L4
  runtimeClassName: nvidia
  nodeSelector: {{ pool: gpus }}
  affinity: {{ nodeAffinity: {{ requiredDuringSchedulingIgnoredDuringExecution: {{ nodeSelectorTerms: [] }} }} }}
  tolerations: [{{ key: gpus, operator: Exists }}]
modelCache: {{ type: claim, size: 300Gi, storageClassName: shared }}
tmp: {{ size: 30Gi }}
hf: {{ secret: hub }}
webhook: {{ secret: hooks }}
extraEnv: [{{ name: HTTPS_PROXY, value: "http://proxy" }}]
envFrom: [{{ secretRef: {{ name: ours }} }}]
store: {{ bucket: "s3://there", secret: "" }}
networkPolicy:
  ports: [443, 9000]
  apiPort: 8443
  dns: {{ namespace: openshift-dns, cidrs: [169.254.20.10/32], port: 5353 }}
  metadata: {{ cidrs: [169.254.169.254/32], ports: [80, 988] }}
  operatorNamespace: ray
  monitoringNamespace: prometheus
""")
HEAD, WORKER = "RayCluster/spec/headGroupSpec/template", "RayCluster/spec/workerGroupSpecs/0/template"
SUBMIT, EGRESS = "CronJob/spec/jobTemplate/spec/template", "NetworkPolicy/spec/egress"
CONTAINER, HEAD_CONTAINER = f"{WORKER}/spec/containers/0", f"{HEAD}/spec/containers/0"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
FAST_CLAIM = {
    "accessModes": ["ReadWriteOnce"],
    "storageClassName": "fast",
    "resources": {"requests": {"storage": "200Gi"}},
}
SHARED_CLAIM = {
    "accessModes": ["ReadWriteMany"],
    "storageClassName": "shared",
    "resources": {"requests": {"storage": "300Gi"}},
}


def secret_key(name: str, key: str) -> Object:
    return {"secretKeyRef": {"name": name, "key": key}}


def namespace(name: str) -> Object:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


def block(cidr: str) -> Object:
    return {"ipBlock": {"cidr": cidr}}


@functools.cache
def objects() -> list[Object]:
    return rendered(given=GIVEN)


def at(place: str) -> Any:
    """Return what is in the first object of a kind, by names of fields, numbers or `name`s of a list's items."""
    kind, *path = place.split("/")
    found: Any = next(each for each in objects() if each["kind"] == kind)
    for name in path:
        if isinstance(found, list):
            found = found[int(name)] if name.isdigit() else next(each for each in found if each["name"] == name)
        else:
            found = found[name.replace("|", "/")]
    return found


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (f"{CONTAINER}/image", f"swiftbatch@{DIGEST}"),
        (f"{CONTAINER}/imagePullPolicy", "Always"),
        (f"{SUBMIT}/spec/containers/0/imagePullPolicy", "Always"),
        *((f"{pod}/metadata/annotations/example.com|team", "answers") for pod in (HEAD, WORKER, SUBMIT)),
        (f"{HEAD}/metadata/annotations/karpenter.sh|do-not-disrupt", "true"),
        ("ServiceAccount/metadata/annotations", {"eks.amazonaws.com/role-arn": "role"}),
        (f"{HEAD_CONTAINER}/resources/requests", {"cpu": "3", "memory": "9Gi", "ephemeral-storage": "11Gi"}),
        (f"{HEAD_CONTAINER}/resources/limits", {"memory": "9Gi"}),
        (f"{CONTAINER}/resources/requests/cpu", "5"),
        (f"{CONTAINER}/resources/requests/ephemeral-storage", "120Gi"),
        (f"{CONTAINER}/resources/limits", {"memory": "64Gi", "nvidia.com/gpu": "2"}),
        (f"{HEAD}/spec/nodeSelector", {"pool": "system"}),
        (f"{SUBMIT}/spec/nodeSelector", {"pool": "system"}),
        (f"{WORKER}/spec/nodeSelector", {"pool": "gpus", "nvidia.com/gpu.product": "NVIDIA-L4"}),
        (f"{HEAD}/spec/tolerations", [{"key": "system", "operator": "Exists"}]),
        (f"{SUBMIT}/spec/tolerations", [{"key": "system", "operator": "Exists"}]),
        (f"{WORKER}/spec/tolerations", [{"key": "gpus", "operator": "Exists"}]),
        (f"{HEAD}/spec/affinity/podAntiAffinity", {}),
        (
            f"{HEAD}/spec/affinity/nodeAffinity/required{PREFERRED[9:]}/nodeSelectorTerms/0/matchExpressions/0/values",
            ["true"],
        ),
        (f"{WORKER}/spec/affinity/nodeAffinity/required{PREFERRED[9:]}", {"nodeSelectorTerms": []}),
        (f"{WORKER}/spec/affinity/nodeAffinity/{PREFERRED}/0/weight", 100),
        (f"{WORKER}/spec/runtimeClassName", "nvidia"),
        (f"{HEAD}/spec/volumes/home/emptyDir", {"sizeLimit": "12Gi"}),
        (f"{WORKER}/spec/volumes/home/ephemeral/volumeClaimTemplate/spec", FAST_CLAIM),
        (f"{WORKER}/spec/volumes/tmp/emptyDir", {"sizeLimit": "30Gi"}),
        *(
            (f"{pod}/spec/volumes/models/persistentVolumeClaim/claimName", "swiftbatch-models")
            for pod in (HEAD, WORKER)
        ),
        *((f"{each}/volumeMounts/models/mountPath", "/models") for each in (HEAD_CONTAINER, CONTAINER)),
        *((f"{each}/env/HF_HUB_CACHE/value", "/models") for each in (HEAD_CONTAINER, CONTAINER)),
        ("PersistentVolumeClaim/spec", SHARED_CLAIM),
        *((f"{each}/env/HF_TOKEN/valueFrom", secret_key("hub", "HF_TOKEN")) for each in (HEAD_CONTAINER, CONTAINER)),
        (f"{HEAD_CONTAINER}/env/SWIFTBATCH_WEBHOOK_SECRET/valueFrom", secret_key("hooks", "secret")),
        (f"{CONTAINER}/env/HTTPS_PROXY/value", "http://proxy"),
        (f"{CONTAINER}/envFrom", [{"secretRef": {"name": "ours"}}]),
        (f"{EGRESS}/1/to", [namespace("openshift-dns"), block("169.254.20.10/32")]),
        (f"{EGRESS}/1/ports/0/port", 5353),
        (f"{EGRESS}/2", {"to": [block("169.254.169.254/32")], "ports": [{"port": 80}, {"port": 988}]}),
        (f"{EGRESS}/3/ports", [{"port": 443}, {"port": 9000}]),
        ("NetworkPolicy/spec/ingress/1/from", [namespace("prometheus")]),
    ],
)
def test_a_value_is_where_kubernetes_looks_for_it(place: str, expected: Any) -> None:
    assert at(place) == expected


@pytest.mark.sample(2)
@pytest.mark.parametrize("version", VERSIONS)
def test_objects_with_these_values_are_sound_and_have_the_labels_of_helm(version: str) -> None:
    validate_pods(objects(), version)
    for each in objects():
        labels = each["metadata"]["labels"]
        assert (labels["helm.sh/chart"], labels["app.kubernetes.io/managed-by"]) == ("swiftbatch-0.1.0", "Helm")
        if each["apiVersion"] in ("v1", "networking.k8s.io/v1"):
            validate(each, version)
    head = one(objects(), "NetworkPolicy", "swiftbatch-head")["spec"]
    assert head["egress"] == [{"ports": [{"port": 8443}]}]
    assert head["ingress"][0]["from"] == [namespace("ray")]
    assert "SWIFTBATCH_WEBHOOK_SECRET" not in str(at(WORKER))


@pytest.mark.parametrize("num_gpus", [0, 1, 2, 8])
def test_a_pod_s_gpus_are_those_of_its_worker(num_gpus: int) -> None:
    objects = rendered(None, f"workers.gpus={num_gpus}", "serve.enabled=true", "serve.keysSecret=keys")
    assert {options(words)["num_gpus_per_worker"] for words in commands(objects).values()} == {num_gpus or None}
    assert settings(objects)["SWIFTBATCH_OPTIONS"].count("--gpus-per-worker") == bool(num_gpus)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (("workers.gpus=1",), None),
        (("workers.gpus=2", "slots=32"), 32),
        (("workers.gpus=0",), 4),
        (("workers.gpus=0", "slots=2"), 2),
    ],
)
def test_a_gpu_worker_finds_out_itself_how_many_jobs_fit(values: tuple[str, ...], told: int | None) -> None:
    objects = rendered(None, *values)
    assert settings(objects)["SWIFTBATCH_OPTIONS"].count("--slots") == (told is not None)
    assert {options(words)["num_slots"] for words in commands(objects).values()} == {told}


@pytest.mark.parametrize(
    ("values", "where", "volume"),
    [
        (
            "workers.home.type=claim,workers.home.existingClaim=a",
            "workerGroup",
            {"persistentVolumeClaim": {"claimName": "a"}},
        ),
        ("modelCache.type=claim,modelCache.existingClaim=b", "Group", {"persistentVolumeClaim": {"claimName": "b"}}),
        ("modelCache.type=hostPath,modelCache.hostPath=/m", "Group", {"hostPath": {"path": "/m", "type": "Directory"}}),
    ],
)
def test_models_may_be_kept_on_a_volume_that_is_there(values: str, where: str, volume: Object) -> None:
    objects = rendered(None, values, "createNamespace=true")
    validate_pods(objects)
    name = "home" if "home" in values else "models"
    for place, pod in pods(objects).items():
        assert ({"name": name, **volume} in pod["spec"]["volumes"]) == (where in place)
    names = [each["metadata"]["name"] for each in objects if each["kind"] == "PersistentVolumeClaim"]
    assert names == ["swiftbatch-store"]
    enforced = one(objects, "Namespace")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    assert enforced == ("privileged" if "hostPath" in volume else "restricted")  # others refuse folders of nodes


def test_the_model_may_be_in_the_cache_before_the_first_night() -> None:
    def job(*values: str) -> Object:
        return one(rendered(None, "modelCache.type=claim", "modelCache.prefetch=true", "hf.secret=hub", *values), "Job")

    given = job("model=meta-llama/Llama-3.1-8B")
    validate(given)
    pod = given["spec"]["template"]["spec"]
    [container] = pod["containers"]
    program, model = container["command"][2:]
    assert model == "meta-llama/Llama-3.1-8B"
    subprocess.run([sys.executable, "-c", program, "embedded"], check=True, timeout=120)
    assert {"name": "HF_HUB_CACHE", "value": "/models"} in container["env"]
    assert "HF_TOKEN" in str(container["env"])
    assert {"name": "models", "mountPath": "/models"} in container["volumeMounts"]
    assert {"name": "models", "persistentVolumeClaim": {"claimName": "swiftbatch-models"}} in pod["volumes"]
    names = {job(f"model={name}")["metadata"]["name"] for name in ("a", "b")}
    assert len(names) == 2  # a Job can't be changed


def test_without_a_model_cache_the_hub_s_files_are_in_home() -> None:
    for container in ray_containers(rendered()):
        assert "HF_HUB_CACHE" not in str(container["env"])
        assert {mount["name"] for mount in container["volumeMounts"]} == {"tmp", "home", "store"}


def test_there_may_be_no_network_policy() -> None:
    assert not [each for each in rendered(None, "networkPolicy.enabled=false") if each["kind"] == "NetworkPolicy"]


def leaves(values: Any, schema: Any) -> Iterator[str]:
    """Yield the names of all values, as `store.bucket`, and check that the schema has these alone."""
    for name, value in values.items():
        entry = schema["properties"][name]
        entry = SCHEMA["definitions"].get(entry.get("$ref", "").rpartition("/")[2], entry)
        if "properties" in entry:
            assert entry["additionalProperties"] is False, name
            assert entry["properties"].keys() == value.keys(), name
            yield from (f"{name}.{below}" for below in leaves(value, entry))
        else:
            yield name


def test_every_value_has_its_place_in_the_schema_and_is_told_of() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    assert SCHEMA["properties"].keys() == {*values, "global"}  # Helm adds that one
    told = page("k8s/README.md")
    for name in leaves(values, SCHEMA):
        first = name.partition(".")[0]
        assert any(f"`{each}`" in told for each in (first, f"{first}.*")), name
