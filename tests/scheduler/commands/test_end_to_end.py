"""Through the real command, a driver is killed with its workers, and every token of every adapter is the same."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from swiftbatch.scheduler.cli import main
from tests.jobs.checkpoints.checkpoint_parts import logged_jobs
from tests.scheduler.commands.command_parts import job, write_jobs
from tests.scheduler.commands.submit_parts import submit_file
from tests.scheduler.driving import DEADLINE_SECONDS, Driver, bodies, is_alive, outputs, swiftbatch, wait_until
from tests.scheduler.runs.extension_parts import run_all
from tests.worker.model.lora_parts import write_adapter
from tests.worker.session.session_parts import PLAINLY

pytestmark = pytest.mark.ray

NUM_TOKENS = 3000
LONG = {
    "greedy": job("greedy", NUM_TOKENS, temperature=0, ignore_eos=True),
    "drawn": job("drawn", NUM_TOKENS, ignore_eos=True, min_p=0.02, lora="a"),
    "penalized": job("penalized", NUM_TOKENS, ignore_eos=True, repetition_penalty=1.2, lora="b"),
}
OFTEN = ["--checkpoint-seconds", "0.3"]  # so that a job of a few seconds has a checkpoint early


def status(run: Path) -> dict[str, Any]:
    """Run `status` in this process, because another interpreter takes seconds to start."""
    return dict(json.loads(CliRunner().invoke(main, ["status", str(run), "--json"]).stdout))


def undisturbed(jobs_file: str, folder: Path, model: Path, lora: list[str]) -> dict[str, Any]:
    """Return the results of one session without Ray."""
    said = {"model": str(model), "dtype": "float32", "num_threads": 1, "lora": tuple(lora)}
    run = submit_file(jobs_file, str(folder), **said).run
    run_all(run, model, **PLAINLY, lora=run.manifest.lora)
    run.write_output()
    assert [body["usage"]["completion_tokens"] for body in bodies(folder).values()] == [NUM_TOKENS] * 3 + [40]
    return outputs(folder)


def test_a_killed_driver_loses_nothing(tiny_model: Path, tmp_path: Path) -> None:
    jobs_file = write_jobs(tmp_path / "jobs.jsonl", *LONG.values(), job("short", 40, ignore_eos=True))
    lora = [f"{name}={write_adapter(tmp_path / name, tiny_model, seed)}" for seed, name in enumerate("ab")]
    run = tmp_path / "run"
    # float32: layers this small are not row-exact in bf16, as `doctor` says of this model
    where = ["--run", str(run), "--model", str(tiny_model), "--threads", "1", "--dtype", "float32"]
    command = swiftbatch("submit", jobs_file, *where, *OFTEN, *(f"--lora={each}" for each in lora))
    with Driver(command, os.environ, run) as driver:
        driver.wait_for(lambda: LONG.keys() <= {job_id.rsplit("-", 1)[0] for job_id in logged_jobs(run)})
        pids = [worker.pid for worker in driver.wait_for(driver.busy_workers)]
        assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in pids} == {os.getpriority(os.PRIO_PROCESS, 0)}
        driver.process.kill()
        driver.process.wait()
        assert status(run)["state"] == "interrupted"
        wait_until(lambda: not any(map(is_alive, pids)))  # they must not outlive their driver
        assert "ray" not in driver.output().lower()  # no chatter from below
    again = subprocess.run(
        swiftbatch("resume", str(run), "--json"), capture_output=True, text=True, timeout=DEADLINE_SECONDS
    )
    assert again.returncode == 0, again.stdout + again.stderr
    events = [json.loads(line) for line in again.stdout.splitlines()]
    [seconds] = [event["seconds"] for event in events if event["event"] == "worker_ready"]
    assert {"imports", "session", "weights"} <= {name for name, value in seconds.items() if value > 0}
    assert outputs(run) == undisturbed(jobs_file, tmp_path / "alone", tiny_model, lora)
    assert all(bodies(run)[name]["metrics"]["num_recovered_tokens"] for name in LONG)
    assert len({choices[0]["token_ids_sha256"] for choices in outputs(run).values()}) == 4
