"""`swiftbatch nightly` as a job that was submitted to a Ray cluster, which is how Kubernetes runs it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from swiftbatch.jobs.child_processes import environment_of_code, module_command
from swiftbatch.jobs.run.run import Run
from swiftbatch.scheduler.chaos.local_cluster import local_cluster
from tests.scheduler.driving import DEADLINE_SECONDS

pytestmark = pytest.mark.ray

JOB = {"custom_id": "x", "prompt": "the quick brown fox", "max_tokens": 8}
# what the supervisor of a submitted job hands to its driver, by that name
SUBMITTED = {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": {"env_vars": {"NIGHT": "1"}}})}


def test_a_submitted_job_sends_its_code_to_the_workers(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "inbox").mkdir()
    (tmp_path / "inbox" / "a.jsonl").write_text(json.dumps(JOB) + "\n")
    users = tmp_path / "user's"
    users.mkdir()
    for name in ("pyarrow", "numpy"):  # which Ray imports in a worker before any code of ours
        (users / f"{name}.py").write_text("raise SystemExit('a file of the user was run')")
    with local_cluster(num_cpus=1, num_raylets=1) as cluster:
        where = ["--runs", str(tmp_path / "runs"), "--address", cluster.address, "--model", str(tiny_model)]
        words = ["nightly", str(tmp_path / "inbox"), *where, "--device", "cpu"]
        command = module_command("swiftbatch.scheduler.cli", *words)  # as installed: its own folder is not on its path
        environment = environment_of_code() | cluster.environment | SUBMITTED
        process = subprocess.run(
            command, cwd=users, env=environment, capture_output=True, text=True, timeout=DEADLINE_SECONDS
        )
    assert process.returncode == 0, process.stderr
    assert len(Run.open(str(tmp_path / "runs" / "a.jsonl")).ended()[0]) == 1
