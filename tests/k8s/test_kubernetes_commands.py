from __future__ import annotations

import copy
import os
import re
import subprocess
from pathlib import Path

import pytest

from swiftbatch.metrics import exporter
from swiftbatch.worker.config import CheckpointSettings
from tests.jobs.input.job_lines import read_jobs
from tests.k8s.chart import OVERLAYS
from tests.k8s.kubernetes_parts import RAY, ROOT, Object, commands, one, pods, ray_containers, render
from tests.readme.command_lines import options


def test_every_command_is_one_that_the_command_line_takes(objects: list[Object]) -> None:
    found = commands(objects)
    assert {where.rpartition("/")[0] for where in found} >= {"RayJob/swiftbatch-once/spec"}
    assert sorted(words[0] for words in found.values()) == ["nightly", "nightly", "submit"]
    for words in found.values():
        given = options(words)
        assert given["may_take_over"], "nobody is there to say so at night"
        assert given.get("if_busy") in (None, "wait")


def test_the_pods_whose_shell_expands_the_settings_have_them(objects: list[Object]) -> None:
    source = {"configMapRef": {"name": "swiftbatch-settings"}}
    containers = [c for pod in pods(objects).values() for c in pod["spec"]["containers"]]
    assert [c["name"] for c in containers if source in c.get("envFrom", ())] == ["submit", *["ray-job-submitter"] * 2]


def test_a_command_with_a_wrong_option_is_found(objects: list[Object]) -> None:
    changed = copy.deepcopy(objects)
    one(changed, "ConfigMap", "swiftbatch-settings")["data"]["SWIFTBATCH_OPTIONS"] += " --wokers 3"
    for words in commands(changed).values():
        with pytest.raises(Exception, match="wokers"):
            options(words)


def test_of_the_ways_to_run_jobs_the_cron_job_alone_is_awake(objects: list[Object]) -> None:
    assert one(objects, "RayJob")["spec"]["suspend"] is True
    assert one(objects, "RayCronJob")["spec"]["suspend"] is True
    assert "suspend" not in one(objects, "CronJob")["spec"]
    assert one(objects, "CronJob")["spec"]["concurrencyPolicy"] == "Forbid"


def test_the_commands_ask_for_the_workers_that_the_cluster_can_have(objects: list[Object]) -> None:
    (group,) = one(objects, "RayCluster")["spec"]["workerGroupSpecs"]
    requests = group["template"]["spec"]["containers"][0]["resources"]["requests"]
    has_gpu = "nvidia.com/gpu" in requests
    for words in commands(objects).values():
        given = options(words)
        assert given["num_workers"] == group["maxReplicas"]
        assert given["device"] == ("cuda" if has_gpu else "cpu")  # `auto` sees no GPU before a worker runs
        assert given["num_threads"] <= int(requests["cpu"])
        assert group["minReplicas"] == 0


def test_a_worker_has_the_time_to_drain_before_it_is_killed(objects: list[Object]) -> None:
    graces = {options(words)["grace_seconds"] for words in commands(objects).values()}
    assert graces == {CheckpointSettings.grace_seconds}
    for where, pod in pods(objects).items():
        if "Group" in where:
            (container,) = pod["spec"]["containers"]
            drain = {variable["name"]: variable["value"] for variable in container["env"]}
            seconds = float(drain["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
            assert max(graces) + 5 <= seconds <= 30, where  # the shortest notice of a spot node
            assert seconds + 10 <= pod["spec"]["terminationGracePeriodSeconds"], where
            assert "exec" in container["args"][0], "a shell in front would swallow SIGTERM"
            assert pod["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"


def test_the_night_s_pod_has_the_token_of_the_cluster_that_it_speaks_to(objects: list[Object]) -> None:
    cluster, job = one(objects, "RayCluster"), one(objects, "CronJob")["spec"]["jobTemplate"]["spec"]
    assert cluster["spec"]["authOptions"] == {"mode": "token"}
    (container,) = job["template"]["spec"]["containers"]
    environment = {variable["name"]: variable for variable in container["env"]}
    assert environment["RAY_AUTH_MODE"]["value"] == "token"
    name = cluster["metadata"]["name"]
    assert environment["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": name, "key": "auth_token"}
    assert f"--address http://{name}-head-svc:8265 -- swiftbatch nightly" in container["args"][0]


RAY_JOB_SUBMIT = """#!/usr/bin/env python3
import subprocess, sys
words = sys.argv[sys.argv.index("--") + 1 :]
# as Ray: the words become one line, which a shell runs where the driver is; of its exit code, failure or not is told
sys.exit(bool(subprocess.call(subprocess.list2cmdline(words), shell=True)))
"""


@pytest.mark.parametrize(("code", "told"), [(0, 0), (1, 1), (2, 1), (3, 0), (130, 1)])
def test_a_night_that_stops_at_a_limit_is_not_tried_again_and_others_are(code: int, told: int, tmp_path: Path) -> None:
    job = one(render("gpu-spot"), "CronJob")["spec"]["jobTemplate"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    for name, text in (("ray", RAY_JOB_SUBMIT), ("swiftbatch", '#!/bin/sh\n[ "$2" = /in ] && exit $CODE\n')):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CODE": str(code)}
    settings = {"SWIFTBATCH_INBOX": "/in", "SWIFTBATCH_RUNS": "/runs", "SWIFTBATCH_OPTIONS": "--workers 2"}
    command = [*container["command"], *container["args"]]
    assert subprocess.run(command, env=environment | settings, timeout=60).returncode == told


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_metrics_are_where_prometheus_looks_for_them(overlay: str) -> None:
    objects = render(overlay)
    head = ray_containers(objects)[0]
    ports = {port["name"]: port["containerPort"] for port in head["ports"]}
    assert {options(words)["metrics_port"] for words in commands(objects).values()} == {ports["driver-metrics"]}
    (service_port,) = one(objects, "Service")["spec"]["ports"]
    assert ports[service_port["targetPort"]] == service_port["port"]
    policy = one(objects, "NetworkPolicy", "swiftbatch")
    open_ports = {port["port"] for rule in policy["spec"]["ingress"] for port in rule.get("ports", ())}
    assert {ports["driver-metrics"], ports["metrics"]} <= open_ports
    if overlay == "cpu-demo":
        assert {each["apiVersion"] for each in objects} <= {"v1", "batch/v1", "networking.k8s.io/v1", "policy/v1", RAY}
        return
    (found,) = one(objects, "ScrapeConfig")["spec"]["httpSDConfigs"]
    service = one(objects, "Service")["metadata"]
    where = f"{service['name']}.swiftbatch.svc:{service_port['port']}"
    assert found["url"] == f"http://{where}{exporter.DISCOVERY_PATH}"
    assert {point["port"] for point in one(objects, "PodMonitor")["spec"]["podMetricsEndpoints"]} <= ports.keys()


def test_the_demo_s_jobs_are_jobs() -> None:
    jobs, rejects = read_jobs(str(ROOT / "k8s/overlays/cpu-demo/demo-jobs/jobs.jsonl"), 0)
    assert len(jobs) == 3
    assert rejects == []


def test_the_commands_and_folders_of_its_readme_are_there() -> None:
    readme = (ROOT / "k8s/README.md").read_text(encoding="utf-8")
    found = re.findall(r"-- swiftbatch ([^>\n]+)", readme)
    assert found
    for command in found:
        options(command.split())
    folders = set(re.findall(r"`((?:overlays|chart)/[\w./-]+)`", readme))
    assert {f"overlays/{name}" for name in OVERLAYS} <= folders
    assert all((ROOT / "k8s" / folder).exists() for folder in folders)
