from __future__ import annotations

import pytest

from tests.k8s.chart import CHART, OVERLAYS, rendered, run_helm
from tests.k8s.kubernetes_parts import Object, commands, one, pods, ray_containers, render, validate
from tests.readme.command_lines import options

QUEUE = "kueue.x-k8s.io/queue-name"


def test_helm_finds_no_fault_in_the_chart() -> None:
    process = run_helm("lint", "--strict", str(CHART))
    assert process.returncode == 0, process.stdout


EVERY_VALUE = (
    "queueName=nights",
    "labels.team=answers",
    "priorityClassName=batch",
    "imagePullSecrets[0].name=registry",
    "deadline=06:30",
    "graceSeconds=10",
    "options=--checkpoint state",
    "ttlSecondsAfterFinished=60",
    "timeZone=Europe/Berlin",
    "schedule=0 1 * * *",
    "workers.min=2",
    "workers.max=5",
    "workers.gpuProduct=NVIDIA-L4",
    "store.bucket=s3://there/too",
    "store.secret=keys",
)


def test_with_every_value_set_the_objects_are_sound_and_have_them() -> None:
    objects = rendered(None, *EVERY_VALUE)
    assert all(each["metadata"]["labels"]["team"] == "answers" for each in objects)
    for words in commands(objects).values():
        given = options(words)
        assert (given["num_workers"], given["grace_seconds"]) == (5, 10)
        assert words[-4:] == ["--deadline", "06:30", "--checkpoint", "state"]
    for where, pod in pods(objects).items():
        assert pod["spec"]["imagePullSecrets"] == [{"name": "registry"}], where
        assert pod["spec"].get("priorityClassName") == ("batch" if "Group" in where else None), where
    for container in ray_containers(objects):
        assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
    assert one(objects, "RayJob")["spec"]["ttlSecondsAfterFinished"] == 60
    assert one(objects, "CronJob")["spec"]["timeZone"] == one(objects, "RayCronJob")["spec"]["timeZone"]
    for kind in ("CronJob", "RayJob"):  # the last is skipped without KubeRay's schemas
        validate(one(objects, kind))


def test_kueue_gets_clusters_that_it_can_admit_as_a_whole_and_wake_itself() -> None:
    objects = rendered(None, "queueName=nights", "workers.max=3")
    for kind in ("RayCluster", "RayJob"):
        each = one(objects, kind)
        assert each["metadata"]["labels"][QUEUE] == "nights"
        spec = each["spec"].get("rayClusterSpec", each["spec"])
        assert spec["enableInTreeAutoscaling"] is False  # Kueue refuses it
        assert [group["replicas"] for group in spec["workerGroupSpecs"]] == [3]
    assert one(objects, "RayJob")["spec"]["suspend"] is True
    assert one(objects, "RayJob")["spec"]["shutdownAfterJobFinishes"] is True  # Kueue asks for it
    template = one(objects, "CronJob")["spec"]["jobTemplate"]
    assert template["metadata"]["labels"][QUEUE] == "nights"
    assert QUEUE not in str(rendered())


def test_nights_on_clusters_of_their_own_leave_no_cluster_standing() -> None:
    objects = rendered(None, "nights=own")
    assert one(objects, "RayCronJob")["spec"]["suspend"] is False
    assert {"RayCluster", "CronJob"} & {each["kind"] for each in objects} == set()


def test_no_end_of_the_release_deletes_runs() -> None:
    objects = rendered(None, "createNamespace=true", "modelCache.type=claim")
    kept = {
        each["metadata"]["name"]
        for each in objects
        if each["metadata"].get("annotations", {}).get("helm.sh/resource-policy") == "keep"
    }
    assert kept == {"swiftbatch", "swiftbatch-store"}  # the namespace with all that is in it, and the claim
    assert {each["kind"] for each in objects if each["metadata"]["name"] in kept} >= {
        "Namespace",
        "PersistentVolumeClaim",
    }


def test_no_name_is_longer_than_kuberay_takes() -> None:
    objects = rendered(None, release="a-release-with-a-name-as-long-as-helm-takes-it-to-be")
    for each in objects:
        longest = 35 if each["kind"] == "RayCronJob" else 47  # KubeRay appends up to 12 characters
        assert len(each["metadata"]["name"]) <= longest, each["kind"]


@pytest.mark.parametrize(
    "value",
    [
        "quueName=x",
        "workers.maks=3",
        "workers.home.hostPath=/there",
        "workers.home.type=claim",  # of which name?
        "modelCache.type=hostPath",
        "modelCache.prefetch=true",  # into which volume?
        "serve.ingress.hosts=there",
        "networkPolicy.metadata.cidrs[0]=169.254.169.254",
        "networkPolicy.ports[0]=https",
        "image.digest=latest",
        "slots=0",
        "tmp.size=much",
        "deadline=morning",
        "workers.spot=sometimes",
        "workers.gpus=3",
    ],
)
def test_a_misspelt_value_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="schema"):
        rendered(None, value)


def test_more_workers_at_least_than_at_most_are_refused_in_a_line() -> None:
    for nights in ("standing", "own"):
        with pytest.raises(ValueError, match=r"workers\.min: found 3, expected at most workers\.max = 2\n") as told:
            rendered(None, "workers.min=3", "workers.max=2", f"nights={nights}")
        assert str(told.value).count("workers.min") == 1
    assert rendered(None, "workers.min=2", "workers.max=2")


def head_and_workers(overlay: str) -> tuple[list[Object], list[Object]]:
    objects = render(overlay)
    found = pods(objects)
    heads = [pod["metadata"] for where, pod in found.items() if "headGroupSpec" in where]
    return heads, [pod["metadata"] for where, pod in found.items() if "workerGroupSpecs" in where]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_head_is_left_where_it_is_and_a_worker_may_be_moved(overlay: str) -> None:
    heads, workers = head_and_workers(overlay)
    keep = {"karpenter.sh/do-not-disrupt": "true", "cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
    assert len(heads) == len(workers) == 3
    assert all(keep.items() <= head["annotations"].items() for head in heads)
    assert not any(keep.keys() & worker["annotations"].keys() for worker in workers)
    objects = render(overlay)
    budget = one(objects, "PodDisruptionBudget")["spec"]
    [expression] = budget["selector"]["matchExpressions"]
    assert all(head["labels"][expression["key"]] in expression["values"] for head in heads)
    assert not any(worker["labels"][expression["key"]] in expression["values"] for worker in workers)
    # a percentage or maxUnavailable needs a controller with a scale, which Ray's lacks
    assert budget["minAvailable"] > 100


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_night_s_pod_that_is_disrupted_costs_no_try(overlay: str) -> None:
    objects = render(overlay)
    job = one(objects, "CronJob")["spec"]["jobTemplate"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # such a policy requires it
