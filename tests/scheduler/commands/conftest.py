from __future__ import annotations

from pathlib import Path

import pytest

from swiftbatch.jobs.run.run import Run
from tests.scheduler.commands.command_parts import job, write_jobs
from tests.scheduler.commands.submit_parts import submit_file


@pytest.fixture
def jobs_file(tmp_path: Path) -> str:
    return write_jobs(tmp_path / "jobs.jsonl", job("a"), job("b"), job("c"))


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path, jobs_file: str) -> Run:
    return submit_file(jobs_file, str(tmp_path / "run"), model=str(tiny_model)).run
