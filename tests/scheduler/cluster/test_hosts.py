"""Hosts as network namespaces: one is cut off and returns."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from swiftbatch.jobs.run.run_records import WorkerStatus
from swiftbatch.scheduler.chaos.local_cluster import (
    Host,
    LocalCluster,
    NamespaceHosts,
    Node,
    local_cluster,
    namespace_hosts,
)
from swiftbatch.scheduler.demo.prompts import PROMPTS
from tests.jobs.checkpoints.checkpoint_parts import logged_jobs
from tests.scheduler.commands.command_parts import write_jobs
from tests.scheduler.driving import DEADLINE_SECONDS, Driver, is_alive, outputs, swiftbatch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and `ip`"),
]

NUM_NODES = 3  # head and driver have one more host; workers use two of these
NUM_TOKENS = 4000
JOBS = [
    {"custom_id": name, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0.8, "ignore_eos": True}
    for name, prompt in list(PROMPTS.items())[:3]
]


@pytest.fixture
def hosts() -> Iterator[NamespaceHosts]:
    with namespace_hosts() as hosts:
        yield hosts


@pytest.fixture
def cluster(hosts: NamespaceHosts) -> Iterator[LocalCluster]:
    with local_cluster(num_cpus=1, num_raylets=NUM_NODES, hosts=hosts) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def jobs_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_jobs(tmp_path_factory.mktemp("jobs") / "jobs.jsonl", *JOBS)


@pytest.fixture(scope="module")
def undisturbed(jobs_file: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    command = swiftbatch("submit", jobs_file, "--run", str(run), "--slots", "3")
    subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE_SECONDS)
    assert set(outputs(run)) == {job["custom_id"] for job in JOBS}
    return outputs(run)


def start(cluster: LocalCluster, host: Host, run: Path, *args: str) -> Driver:
    options = ["--workers", "2", "--checkpoint-seconds", "0.5", "--address", cluster.address]
    return Driver([*host.prefix, *swiftbatch(*args, *options)], cluster.environment, run)


def test_a_worker_host_that_is_cut_off_and_comes_back_changes_nothing(
    hosts: NamespaceHosts, cluster: LocalCluster, jobs_file: str, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with start(cluster, cluster.head_host, run, "submit", jobs_file, "--run", str(run)) as driver:
        cut_off_and_back(hosts, cluster, driver)
        assert driver.process.wait(DEADLINE_SECONDS) == 0
    assert outputs(run) == undisturbed


def test_a_driver_host_that_is_cut_off_stops_and_another_one_goes_on(
    hosts: NamespaceHosts, cluster: LocalCluster, jobs_file: str, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    run, host = tmp_path / "run", cluster.raylets[-1].host
    with start(cluster, host, run, "submit", jobs_file, "--run", str(run)) as driver:
        worker = driver.wait_for(driver.busy_workers)[0]
        driver.wait_for(lambda: driver.checkpoints(worker).name in logged_jobs(driver.run))
        cut_off = time.monotonic()
        hosts.cut(host)
        assert driver.process.wait(DEADLINE_SECONDS) == 2
        print(f"the driver that was cut off stopped after {time.monotonic() - cut_off:.1f} s")
    assert "Traceback" not in driver.output()
    assert "nothing is lost" in driver.output().splitlines()[-1]
    with start(cluster, cluster.head_host, run, "resume", str(run)) as driver:
        assert driver.process.wait(DEADLINE_SECONDS) == 0
    assert outputs(run) == undisturbed


def cut_off_and_back(hosts: NamespaceHosts, cluster: LocalCluster, driver: Driver) -> None:
    """Cut a host off until its job was given to another, which is then lost."""
    node, stale = driver.wait_for(lambda: busy_on(cluster, driver, cluster.raylets))
    job = driver.checkpoints(stale)
    driver.wait_for(lambda: job.name in logged_jobs(driver.run))
    cut_off = time.monotonic()
    hosts.cut(node.host)
    driver.wait_for(lambda: list(job.glob("*/resume.json")))
    print(f"its job was given to another host after {time.monotonic() - cut_off:.1f} s")
    assert is_alive(stale.pid)  # it has not noticed
    hosts.mend(node.host)
    back = time.monotonic()
    driver.wait_for(lambda: not is_alive(stale.pid))
    print(f"back on the network, its worker ended after {time.monotonic() - back:.1f} s")
    cluster.kill_raylet(node)  # it ended, because the cluster gave it up
    new = cluster.add_raylet()
    other, _ = driver.wait_for(lambda: busy_on(cluster, driver, set(cluster.raylets) - {new}))
    cluster.kill_raylet(other)
    driver.wait_for(lambda: busy_on(cluster, driver, {new}))


def busy_on(cluster: LocalCluster, driver: Driver, nodes: Collection[Node]) -> tuple[Node, WorkerStatus] | None:
    workers = [(cluster.node_of(worker.pid), worker) for worker in driver.busy_workers()]
    return next(((node, worker) for node, worker in workers if node in nodes), None)
