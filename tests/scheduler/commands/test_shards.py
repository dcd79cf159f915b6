from __future__ import annotations

from pathlib import Path

import pytest

from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.shards import DATA, ShardSettings, shard_settings
from swiftbatch.scheduler.runs.run_settings import Settings
from swiftbatch.scheduler.runs.submission import submission
from tests.jobs.shards.shard_parts import all_rows, files
from tests.scheduler.commands.command_parts import finish, invoke, refusal


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
