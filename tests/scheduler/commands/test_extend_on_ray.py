"""`extend` with a killed driver gives the tokens of one long run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swiftbatch.jobs.run.run import Run
from tests.scheduler.commands.command_parts import job, write_jobs
from tests.scheduler.commands.submit_parts import submit_file
from tests.scheduler.driving import Driver, bodies, outputs, swiftbatch
from tests.scheduler.runs.extension_parts import run_all

pytestmark = pytest.mark.ray

FIRST, LONGER = 200, 2500
OFTEN = ["--checkpoint-seconds", "0.2"]


def made_run(folder: Path, model: Path, max_tokens: int) -> Run:
    path = write_jobs(
        folder / f"{max_tokens}.jsonl",
        job("fox", max_tokens, ignore_eos=True),
        job("dogs", max_tokens, ignore_eos=True, n=2),
    )
    said = {"model": str(model), "dtype": "float32", "num_threads": 1}
    run = submit_file(path, str(folder / f"run-{max_tokens}"), **said).run
    run_all(run, model, engine="auto", keep_state=True)
    run.write_output()
    return run


def tokens(run: Path) -> dict[str, list[str]]:
    return {name: [choice["token_ids_sha256"] for choice in choices] for name, choices in outputs(run).items()}


def recovered(run: Path) -> list[int]:
    """Return the tokens that each later attempt at job fox recovered."""
    attempts = bodies(run)["fox"]["metrics"]["attempts"]
    return [attempt["resume"]["num_recovered_tokens"] for attempt in attempts[1:]]


@pytest.mark.slow  # test_extension.py extends with every engine, and test_end_to_end.py resumes on Ray
def test_the_command_takes_all_jobs_on_from_the_tokens_they_have(tmp_path: Path, tiny_model: Path) -> None:
    folder, single = (Path(made_run(tmp_path, tiny_model, num).store.uri) for num in (FIRST, FIRST + 100))
    with Driver(swiftbatch("extend", str(folder), "--max-tokens", str(FIRST + 100)), os.environ, folder) as driver:
        assert driver.process.wait(120) == 0
    assert "3 jobs to go on, 600 tokens are there; each has 300 tokens at most" in driver.output()
    assert tokens(folder) == tokens(single)
    assert bodies(folder)["fox"]["choices"] == bodies(single)["fox"]["choices"]
    assert recovered(folder) == [FIRST]


@pytest.mark.slow
def test_a_driver_killed_amid_extend_loses_nothing_and_resume_brings_every_token(
    tmp_path: Path, tiny_model: Path
) -> None:
    folder = Path(made_run(tmp_path, tiny_model, FIRST).store.uri)
    command = swiftbatch("extend", str(folder), "--max-tokens", str(LONGER), *OFTEN)
    with Driver(command, os.environ, folder) as driver:
        driver.wait_for(lambda: list(folder.glob("checkpoints/workers/*.logs")))
        driver.process.kill()
    with Driver(swiftbatch("resume", str(folder), *OFTEN), os.environ, folder) as driver:
        assert driver.process.wait(120) == 0
    assert tokens(folder) == tokens(Path(made_run(tmp_path, tiny_model, LONGER).store.uri))
    assert recovered(folder)[0] == FIRST < recovered(folder)[-1]
