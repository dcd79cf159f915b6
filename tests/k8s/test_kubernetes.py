from __future__ import annotations

import copy

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.k8s.chart import CHART, rendered
from tests.k8s.kubernetes_parts import (
    RAY,
    ROOT,
    VERSIONS,
    Object,
    one,
    pods,
    ray_containers,
    render,
    settings,
    validate,
    validate_pods,
)

GIVEN_MAPS = {"swiftbatch-demo-jobs"}  # which the user makes
GIVEN_SECRETS = {"swiftbatch", "swiftbatch-s3"}  # the one that KubeRay makes, and the one that the user makes
REFUSALS = (jsonschema.ValidationError, kubernetes_validate.ValidationError)


@pytest.mark.sample(2)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_has_all_its_fields_and_no_other(objects: list[Object], version: str) -> None:
    kinds = "RayCluster RayJob RayCronJob CronJob NetworkPolicy ServiceAccount ConfigMap PodDisruptionBudget"
    assert set(kinds.split()) <= {each["kind"] for each in objects}
    validate_pods(objects, version)
    for each in sorted(objects, key=lambda each: each["apiVersion"] == RAY):  # sorted last, because it may be skipped
        validate(each, version)


def test_the_versions_are_the_chart_s_oldest_and_the_newest_four_at_hand() -> None:
    newest = int(kubernetes_validate.latest_version().split(".")[1])
    oldest = yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"]
    assert (
        oldest.removeprefix(">=").removesuffix("-0"),
        *(f"1.{newest - back}.0" for back in (3, 2, 1, 0)),
    ) == VERSIONS


@pytest.mark.parametrize(
    ("kind", "path", "wrong"),
    [
        ("CronJob", "spec", "concurencyPolicy"),
        ("CronJob", "spec/jobTemplate/spec/template/spec", "terminationGracePeriodSecs"),
        ("CronJob", "spec/jobTemplate/spec/template/spec/containers/0", "enviroment"),
        ("NetworkPolicy", "spec/ingress/0", "form"),
        ("ServiceAccount", "", "automountToken"),
        ("PodDisruptionBudget", "spec", "maxAvailable"),
        ("RayCluster", "spec", "enableInTreeAutoScaling"),
        ("RayCluster", "spec/autoscalerOptions", "idleTimeout"),
        ("RayCluster", "spec/headGroupSpec/template/spec/containers/0/livenessProbe/httpGet", "prot"),
        ("RayCluster", "spec/workerGroupSpecs/0/template/spec", "tolerration"),
        ("RayJob", "spec", "entryPoint"),
        ("RayJob", "spec/rayClusterSpec/workerGroupSpecs/0", "maxReplica"),
        ("RayCronJob", "spec", "concurrencyPolicy"),
        ("RayCronJob", "spec/jobTemplate/submitterPodTemplate/spec", "restartPolice"),
        ("PodMonitor", "spec", "podMetricEndpoints"),
        ("PrometheusRule", "spec/groups/0/rules/0", "exp"),
        ("ScrapeConfig", "spec/httpSDConfigs/0", "uri"),
    ],
)
def test_a_misspelt_field_fails(kind: str, path: str, wrong: str) -> None:
    each = next(copy.deepcopy(each) for each in render("gpu-spot") if each["kind"] == kind)
    validate(each)
    place = each
    for name in path.split("/") if path else ():
        place = place[int(name) if isinstance(place, list) else name]
    place[wrong] = "1"
    with pytest.raises(REFUSALS, match=wrong):
        validate(each)


def test_a_value_of_the_wrong_type_fails() -> None:
    cluster = copy.deepcopy(one(render("gpu-spot"), "RayCluster"))
    cluster["spec"]["workerGroupSpecs"][0]["maxReplicas"] = "8"
    with pytest.raises(REFUSALS, match="'8' is not of type 'integer'"):
        validate(cluster)


def test_the_job_and_the_cron_job_of_ray_have_the_spec_of_the_cluster(objects: list[Object]) -> None:
    spec = dict(one(objects, "RayCluster")["spec"])
    job, nightly = one(objects, "RayJob")["spec"], one(objects, "RayCronJob")["spec"]["jobTemplate"]
    assert spec.pop("upgradeStrategy") == {"type": "Recreate"}  # KubeRay refuses it for clusters of its own making
    assert job["rayClusterSpec"] == nightly["rayClusterSpec"] == spec
    assert job["submitterPodTemplate"] == nightly["submitterPodTemplate"]


def test_dashboards_are_those_of_the_repository(objects: list[Object]) -> None:
    dashboards = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "metrics/grafana").glob("*.json")}
    assert dashboards
    found = one(objects, "ConfigMap", "swiftbatch-dashboards")
    assert found["data"] == dashboards
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert (
        sum(map(len, dashboards.values())) < 250_000
    )  # `kubectl apply` keeps a copy in an annotation of 262,144 bytes


def test_prometheus_loads_the_alerts_and_watches_the_nights_of_this_release() -> None:
    rules = (ROOT / "metrics/alerts.yml").read_text(encoding="utf-8")
    assert rules.count('=~"swiftbatch.*-nightly"') == 3
    expected = yaml.safe_load(rules.replace('=~"swiftbatch.*-nightly"', '="team-a-nightly"'))
    objects = rendered(None, "alertsConfigMap=true", release="team-a")
    assert one(objects, "PrometheusRule")["spec"] == expected
    assert yaml.safe_load(one(objects, "ConfigMap", "team-a-alerts")["data"]["alerts.yml"]) == expected
    assert one(objects, "CronJob")["metadata"]["name"] == "team-a-nightly"
    without = rendered(None, "monitoring=false")
    assert not [each for each in without if "alerts" in str(each["metadata"]) or each["kind"] == "PrometheusRule"]


def test_all_that_is_referred_to_is_there(objects: list[Object]) -> None:
    names = {(each["kind"], each["metadata"]["name"]) for each in objects}
    for where, pod in pods(objects).items():
        spec = pod["spec"]
        assert ("ServiceAccount", spec["serviceAccountName"]) in names, where
        for volume in spec["volumes"]:
            if "persistentVolumeClaim" in volume:
                assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in names
            if "configMap" in volume and volume["configMap"]["name"] not in GIVEN_MAPS:
                assert ("ConfigMap", volume["configMap"]["name"]) in names
        for container in spec["containers"]:
            for source in container.get("envFrom", ()):
                if "configMapRef" in source:
                    assert ("ConfigMap", source["configMapRef"]["name"]) in names
                else:
                    assert source["secretRef"]["name"] in GIVEN_SECRETS
    assert {each["metadata"].get("namespace", "swiftbatch") for each in objects} == {"swiftbatch"}


def test_with_s3_no_pod_has_the_volume_and_every_node_has_the_credentials() -> None:
    objects = render("s3")
    assert not [each for each in objects if each["kind"] == "PersistentVolumeClaim"]
    assert all(settings(objects)[f"SWIFTBATCH_{name}"].startswith("s3://") for name in ("INBOX", "JOBS", "RUNS"))
    for container in ray_containers(objects):
        assert {"secretRef": {"name": "swiftbatch-s3"}} in container["envFrom"]
        assert "store" not in {mount["name"] for mount in container["volumeMounts"]}


def test_the_version_of_ray_is_the_one_in_the_image(objects: list[Object]) -> None:
    version = one(objects, "RayCluster")["spec"]["rayVersion"]
    assert f"ray=={version}" in (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
