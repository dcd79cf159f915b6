from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet

from swiftbatch.jobs.run import job_table
from swiftbatch.jobs.run import job_table as job_table_parts
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import RunError
from swiftbatch.jobs.storage.retries import Retries
from swiftbatch.jobs.storage.store import StoreError
from tests.jobs.run.run_parts import MANIFEST, make_record
from tests.jobs.shards.shard_parts import longer
from tests.jobs.storage.stumbling_disk import stumble

NAMES = [f"job-{number}" for number in range(7)]


@pytest.fixture(params=["local", "s3"])
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(job_table, "ROWS_PER_PART", 2)
    uri = str(tmp_path / "run") if request.param == "local" else request.getfixturevalue("s3_uri")
    run = Run.planned(uri, MANIFEST).made()
    run.add_jobs(make_record(name, number) for number, name in enumerate(NAMES))
    run.add_jobs([longer(run.jobs()[3], 900), make_record("last", 7)])
    return run


def test_jobs_stand_in_input_order_each_in_its_newest_form(run: Run) -> None:
    found = list(run.records())
    assert [record.job.custom_id for record in found] == [*NAMES, "last"]
    assert found[3].job.sampling.max_tokens == 900
    index = run.job_index()
    assert list(index.entries()) == [index.entry(row) for row in range(len(index))]
    assert [entry.job_id for entry in index.entries()] == [record.job_id for record in found]
    assert [entry.max_length for entry in index.entries()] == [record.max_length for record in found]
    assert index.places.tolist() == [0, 1, 2, 7, 4, 5, 6, 8]


def test_a_read_that_fails_once_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_table, "ROWS_PER_PART", 2)
    run = Run.planned(str(tmp_path / "run"), MANIFEST).made()
    run.add_jobs(make_record(name, number) for number, name in enumerate(NAMES))
    expected, num_failed = list(run.records()), 0
    for number in itertools.count():
        with monkeypatch.context() as patch:
            failed = stumble(patch, number)
            assert list(run.records()) == expected
        if not failed:
            break
        num_failed += 1
    assert num_failed > 10


def test_a_read_that_fails_for_longer_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Run.planned(str(tmp_path / "run"), MANIFEST).made().add_jobs([make_record("a", 0)])
    run = Run.open(str(tmp_path / "run"), Retries(0.0))
    stumble(monkeypatch, 0, every=1)
    with pytest.raises(StoreError, match=r"cannot read 'jobs.parquet' .*: Stale file handle"):
        list(run.records())


def test_each_job_is_read_alone_in_any_order(run: Run) -> None:
    index, records = run.job_index(), run.jobs()
    wanted = [7, 0, 3, 5]  # rows
    bodies = run.job_bodies(np.sort(index.places[wanted]))
    for row in wanted:
        assert bodies.at(index.entry(row).place) == records[row].body


def test_the_longest_job_is_known_without_a_look_at_jobs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(job_table_parts, "parts_of")
    assert run.longest_job() == 903


def test_no_part_of_a_table_has_too_many_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_table, "ROWS_PER_PART", 2)
    run = Run.planned(str(tmp_path / "run"), MANIFEST).made()
    run.add_jobs(make_record(name) for name in NAMES)
    metadata = parquet.read_metadata(tmp_path / "run" / "jobs.parquet")
    assert [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)] == [2, 2, 2, 1]
    monkeypatch.setattr(job_table, "CHARACTERS_PER_PART", 1)  # long prompts
    other = Run.planned(str(tmp_path / "other"), MANIFEST).made()
    other.add_jobs(make_record(name) for name in NAMES)
    assert parquet.read_metadata(tmp_path / "other" / "jobs.parquet").num_row_groups == len(NAMES)


@pytest.mark.parametrize("folder", ["results", "checkpoints"])
def test_a_table_that_is_gone_is_told_and_no_job_forgotten(tmp_path: Path, folder: str) -> None:
    run = Run.planned(str(tmp_path / "run"), MANIFEST).made()
    assert run.jobs() == []
    run.add_jobs([make_record("a")])
    (tmp_path / "run" / folder / "a").mkdir(parents=True)
    (tmp_path / "run" / "jobs.parquet").unlink()
    with pytest.raises(RunError, match=r"jobs.parquet.*it is missing, but its jobs have results or checkpoints"):
        run.jobs()
