from __future__ import annotations

import os
from pathlib import Path

import pytest

from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.shards import DATA, ShardSettings, shard_settings
from swiftbatch.scheduler.runs.run_settings import Settings
from swiftbatch.scheduler.runs.submission import submission
from tests.jobs.shards.shard_parts import all_rows, files
from tests.scheduler.commands.command_parts import finish, invoke, job, refusal, write_jobs
from tests.scheduler.driving import Driver, bodies, swiftbatch


@pytest.fixture
def sharded(tmp_path: Path, tiny_model: Path, jobs_file: str) -> Run:
    """Three pending jobs, and shards of two rows."""
    settings = Settings({"model": str(tiny_model)}, shards=ShardSettings.parse("jsonl:2"))
    with submission(jobs_file, str(tmp_path / "run"), settings) as submitted:
        return submitted.run


def test_resume_writes_what_a_killed_driver_has_left(sharded: Run) -> None:
    for name in "abc":
        finish(sharded, name, f"text of {name}")
    result = invoke("resume", sharded.store.uri)
    assert result.exit_code == 0, result.output
    assert f"shard {DATA}/train-00001.jsonl is there: 1 row\n" in result.output
    assert [[row["text"] for row in rows] for rows in all_rows(sharded.store)] == [
        ["text of a", "text of b"],
        ["text of c"],
    ]
    assert "shards: 2 so far, all final, in " in invoke("status", sharded.store.uri).output
    before = files(sharded.store)
    assert "shard " not in invoke("resume", sharded.store.uri).output.replace("shards", "")
    assert files(sharded.store) == before


def test_cancel_writes_the_last_shard_once_nothing_is_pending(sharded: Run) -> None:
    finish(sharded, "b", "text of b")
    invoke("cancel", sharded.store.uri, "a")
    assert all_rows(sharded.store) == []
    invoke("cancel", sharded.store.uri)
    found = [[(row["custom_id"], row["status"]) for row in rows] for rows in all_rows(sharded.store)]
    assert found == [[("a", "cancelled"), ("b", "finished")], [("c", "cancelled")]]


def test_the_format_stays_over_a_run_and_what_is_none_is_refused(
    sharded: Run, jobs_file: str, tiny_model: Path
) -> None:
    args = ["submit", jobs_file, "--run", sharded.store.uri, "--model", str(tiny_model), "--output-shards"]
    assert "has shards of format jsonl, found parquet: use --output-shards jsonl" in refusal(*args, "parquet:2")
    assert "'--output-shards': found 'csv', expected parquet or jsonl, and behind" in refusal(*args, "csv")
    assert shard_settings(sharded.store) == ShardSettings.parse("jsonl:2")


@pytest.mark.slow
def test_a_driver_killed_between_two_shards_has_written_one_that_stays(tmp_path: Path, tiny_model: Path) -> None:
    names = [f"job-{number}" for number in range(12)]
    path = write_jobs(tmp_path / "jobs.jsonl", *(job(name, 400, ignore_eos=True) for name in names))
    folder = tmp_path / "run"
    options = ["--model", str(tiny_model), "--dtype", "float32", "--threads", "1", "--output-shards", "parquet:3"]
    command = swiftbatch("submit", path, "--run", str(folder), "--slots", "2", *options)
    with Driver(command, os.environ, folder) as driver:
        driver.wait_for(lambda: list((folder / DATA).glob("*.parquet")))
        driver.process.kill()
        driver.process.wait()
        before = files(Run.open(str(folder)).store)
    with Driver(swiftbatch("resume", str(folder), "--slots", "2"), os.environ, folder) as driver:
        assert driver.process.wait(120) == 0
    store = Run.open(str(folder)).store
    assert {name: files(store)[name] for name in before} == before
    rows = [row for found in all_rows(store) for row in found]
    texts = {name: body["choices"][0]["text"] for name, body in bodies(folder).items()}
    assert [(row["custom_id"], row["text"]) for row in sorted(rows, key=lambda row: names.index(row["custom_id"]))] == [
        (name, texts[name]) for name in names
    ]
