"""A character that changes in a run folder, or a file of another run, makes no other text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swiftbatch.jobs.run import job_table
from swiftbatch.jobs.run.run import Run, RunError
from swiftbatch.jobs.run.sealed_line import sealed, unsealed
from swiftbatch.jobs.storage.store import Store
from tests.jobs.run.run_parts import MANIFEST, failed_line, make_record

LINE = b'{"id": "a", "text": "The lighthouse"}\n'


def test_every_changed_bit_of_a_sealed_line_is_noticed() -> None:
    whole = sealed(LINE)
    assert json.loads(whole)["text"] == "The lighthouse"
    assert unsealed(whole) == LINE
    for place in range(len(whole)):
        for bit in range(8):
            changed = bytearray(whole)
            changed[place] ^= 1 << bit
            try:
                found = unsealed(bytes(changed))
            except ValueError:
                continue
            # its name or its frame has changed, not what it seals
            assert place >= len(LINE) - 2
            assert found.startswith(LINE[:-2])


def test_a_line_of_an_older_version_has_no_checksum() -> None:
    assert unsealed(LINE) == LINE


def test_a_changed_letter_of_a_result_is_named_and_its_job_runs_again(tmp_path: Path) -> None:
    run = Run.create_or_open(str(tmp_path / "run"), MANIFEST)
    job_id = make_record("fox").job_id
    run.write_error(job_id, failed_line("reason"))
    [path] = (tmp_path / "run" / "errors").iterdir()
    assert run.error(job_id) is not None
    path.write_bytes(path.read_bytes().replace(b"reason", b"season"))
    assert run.error(job_id) is None
    assert list(run.damaged.values()) == ["found content that does not match its checksum"]


def test_a_changed_bit_of_the_table_of_jobs_is_never_another_prompt(tmp_path: Path) -> None:
    records = [make_record("fox"), make_record("dog")]
    data = job_table.to_parquet(records, "run-1")
    num_noticed = 0
    for place in range(0, len(data), 3):
        changed = bytearray(data)
        changed[place] ^= 1
        try:
            assert job_table.from_parquet(bytes(changed), "run-1") == records
        except (ValueError, OSError):
            num_noticed += 1
    assert num_noticed > 50


def test_a_table_of_another_run_is_refused(tmp_path: Path) -> None:
    run = Run.create_or_open(str(tmp_path / "run"), MANIFEST)
    other = job_table.to_parquet([make_record("fox")], "run-of-another")
    Store(str(tmp_path / "run")).write("jobs.parquet", other)
    with pytest.raises(RunError, match=f'jobs of run "run-of-another", expected those of {MANIFEST.run_id}'):
        run.jobs()
