"""Jobs with LoRA adapters survive their killed worker and driver."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.checkpoints.checkpoint_parts import logged_jobs
from tests.scheduler.commands.command_parts import write_jobs
from tests.scheduler.commands.submit_parts import submit_file
from tests.scheduler.commands.test_end_to_end import OFTEN, bodies, outputs, run_command, started, workers
from tests.scheduler.driving import wait_until
from tests.scheduler.runs.extension_parts import run_all
from tests.worker.model.lora_parts import write_adapter
from tests.worker.session.session_parts import PLAINLY

pytestmark = pytest.mark.ray

NUM_TOKENS = 2000
JOBS: list[dict[str, Any]] = [
    {
        "custom_id": str(lora),
        "prompt": "the quick brown fox",
        "lora": lora,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
    }
    for lora in ("a", "b", None)
]


def test_a_killed_worker_and_driver_change_no_token_of_any_adapter(tiny_model: Path, tmp_path: Path) -> None:
    adapters = [f"{name}={write_adapter(tmp_path / name, tiny_model, seed)}" for seed, name in enumerate("ab")]
    jobs, run = write_jobs(tmp_path / "jobs.jsonl", *JOBS), tmp_path / "run"
    said: dict[str, Any] = {"model": str(tiny_model), "dtype": "float32", "num_threads": 1, "lora": tuple(adapters)}
    alone = submit_file(jobs, str(tmp_path / "alone"), **said).run
    run_all(alone, tiny_model, **PLAINLY, lora=alone.manifest.lora)
    alone.write_output()
    command = ["submit", jobs, "--model", str(tiny_model), "--dtype", "float32", "--threads", "1", "--run", str(run)]
    with started(*command, *OFTEN, *(f"--lora={each}" for each in adapters)) as process:
        wait_until(lambda: len(logged_jobs(run)) == len(JOBS))
        for worker in workers(run):
            os.kill(worker.pid, signal.SIGKILL)
        process.kill()
        process.wait()
    again = run_command("resume", str(run))
    assert again.returncode == 0, again.stdout + again.stderr
    assert outputs(run) == outputs(Path(alone.store.uri))
    assert len({sha256 for _, sha256, _ in outputs(run).values()}) == len(JOBS)
    assert all(body["metrics"]["num_recovered_tokens"] for body in bodies(run).values())
