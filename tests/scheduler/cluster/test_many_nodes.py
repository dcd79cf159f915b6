"""Nodes, workers and the head leave with and without notice."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swiftbatch.jobs.python_processes import module_command
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import WorkerStatus
from swiftbatch.scheduler.chaos.local_cluster import LocalCluster, local_cluster
from swiftbatch.scheduler.demo.prompts import PROMPTS
from tests.jobs.checkpoints.checkpoint_parts import logged_jobs
from tests.scheduler.commands.submit_parts import submit_file
from tests.scheduler.driving import DEADLINE_SECONDS, Driver, bodies, outputs, swiftbatch
from tests.scheduler.runs.extension_parts import run_all
from tests.worker.session.session_parts import PLAINLY

pytestmark = pytest.mark.ray

NUM_TOKENS = 1000
JOBS: list[dict[str, Any]] = [
    {"custom_id": name, "prompt": prompt, "max_tokens": 4 * NUM_TOKENS, "temperature": 0.8, "ignore_eos": True}
    for name, prompt in list(PROMPTS.items())[:3]
]
OPTIONS = ["--checkpoint-tokens", "64"]
# what a submitted job's supervisor passes to its driver
SUBMITTED = {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": {"env_vars": {"NIGHT": "1"}}})}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Two nodes besides the head; a test that needs both starts one more."""
    with local_cluster(num_cpus=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def jobs_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_jobs(tmp_path_factory.mktemp("jobs") / "jobs.jsonl", JOBS[:2])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("undisturbed")
    run = submit_file(write_jobs(folder / "jobs.jsonl", JOBS), str(folder / "run")).run
    run_all(run, Path(run.manifest.model), dtype=run.manifest.dtype, **PLAINLY)
    run.write_output()
    return outputs(Path(run.store.uri))


def write_jobs(path: Path, jobs: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(job) + "\n" for job in jobs))
    return str(path)


def submit(cluster: LocalCluster, jobs_file: str, run: Path, *args: str) -> Driver:
    where = ["--run", str(run), "--address", cluster.address]
    return Driver(swiftbatch("submit", jobs_file, *where, *OPTIONS, *args), cluster.environment, run)


def wait_for_a_checkpoint(driver: Driver) -> Any:
    """Return a worker whose job has a log, so that something can be lost."""
    worker = driver.wait_for(driver.busy_workers)[0]
    driver.wait_for(lambda: driver.checkpoints(worker).name in logged_jobs(driver.run))
    return worker


def assert_same(run: Path, undisturbed: dict[str, Any], num_jobs: int = 2) -> None:
    found = outputs(run)
    assert len(found) == num_jobs
    assert found == {custom_id: undisturbed[custom_id] for custom_id in found}


def num_preemptions(driver: Driver, reason: str) -> float:
    address = re.search(r"metrics of the driver at (\S+)", driver.output())
    with urllib.request.urlopen(address[1], timeout=60) as page:
        metrics = page.read().decode()
    found = re.search(rf'^swiftbatch_preemptions_total{{.*reason="{reason}".*}} (\S+)', metrics, re.MULTILINE)
    return float(found[1]) if found else 0


def test_a_submitted_job_sends_its_code_to_the_workers(cluster: LocalCluster, tmp_path: Path, tiny_model: Path) -> None:
    """Kubernetes runs `swiftbatch nightly` like this."""
    (tmp_path / "inbox").mkdir()
    write_jobs(tmp_path / "inbox" / "a.jsonl", [{"custom_id": "x", "prompt": "the quick brown fox", "max_tokens": 8}])
    users = tmp_path / "user's"
    users.mkdir()
    for name in ("pyarrow", "numpy"):  # Ray imports these in a worker before any code of ours
        (users / f"{name}.py").write_text("raise SystemExit('a file of the user was run')")
    where = ["--runs", str(tmp_path / "runs"), "--address", cluster.address, "--model", str(tiny_model)]
    words = ["nightly", str(tmp_path / "inbox"), *where, "--device", "cpu"]
    command = module_command("swiftbatch.scheduler.cli", *words)  # as installed, without its own folder in the path
    environment = cluster.environment | SUBMITTED
    process = subprocess.run(
        command, cwd=users, env=environment, capture_output=True, text=True, timeout=DEADLINE_SECONDS
    )
    assert process.returncode == 0, process.stderr
    assert len(Run.open(str(tmp_path / "runs" / "a.jsonl")).ended()[0]) == 1


@pytest.mark.slow
def test_chaos_runs_on_a_cluster_that_is_there(cluster: LocalCluster, tmp_path: Path) -> None:
    findings = tmp_path / "chaos.json"
    size = ["--jobs", "2", "--tokens", "12000", "--kills", "2", "--slots", "1", "--checkpoint-tokens", "64"]
    where = ["--address", cluster.address, "--run", str(tmp_path / "runs"), "--json", str(findings)]
    command = swiftbatch("chaos", *size, *where)
    process = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert process.returncode == 0, process.stdout + process.stderr
    report = json.loads(findings.read_text())
    assert report["is_identical"]
    assert {kind: num for kind, num in report["kills_by_kind"].items() if num} == {"worker": 1, "driver": 1}


def goes_on_elsewhere(driver: Driver, lost: WorkerStatus) -> bool:
    return any(lost.jobs[0] in worker.jobs for worker in driver.busy_workers() if worker.id != lost.id)


def test_a_killed_node_and_then_a_head_that_is_lost_and_started_anew_lose_nothing(
    cluster: LocalCluster, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    jobs_file = write_jobs(tmp_path / "jobs.jsonl", JOBS)
    with submit(cluster, jobs_file, tmp_path / "run", "--metrics-port", "0") as driver:
        worker = wait_for_a_checkpoint(driver)
        node = cluster.node_of(worker.pid)
        cluster.kill_raylet(node)  # the other one is up
        driver.wait_for(lambda: num_preemptions(driver, "worker_died") + num_preemptions(driver, "node_lost") > 0)
        driver.wait_for(lambda: goes_on_elsewhere(driver, worker))
        assert f"worker {worker.id} is lost" in driver.output()
        cluster.head.kill()
        cluster.start_head()
        assert driver.process.wait(DEADLINE_SECONDS) == 2
    last_line = driver.output().splitlines()[-1]
    assert "Traceback" not in driver.output()
    assert "nothing is lost" in last_line
    assert f"swiftbatch resume {driver.run}" in last_line
    for node in list(cluster.raylets):
        cluster.kill_raylet(node)
    cluster.add_raylet().wait_until_up()
    resume = swiftbatch("resume", str(driver.run), "--address", cluster.address, *OPTIONS)
    process = subprocess.run(resume, env=cluster.environment, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert process.returncode == 0, process.stdout + process.stderr
    assert_same(driver.run, undisturbed, len(JOBS))
    metrics = {custom_id: body["metrics"] for custom_id, body in bodies(driver.run).items()}
    assert metrics[worker.jobs[0]]["num_attempts"] in (2, 3)  # it may have ended before the head was lost
    assert metrics[worker.jobs[0]]["num_recovered_tokens"] > 0
