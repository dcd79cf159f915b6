"""A changed character or a foreign file in a run never changes a text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swiftbatch.jobs.json_records import SEAL, sealed, unsealed
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import RunError
from swiftbatch.jobs.storage.store import Store
from tests.jobs.run.run_parts import MANIFEST, failed_line, make_record
from tests.jobs.run.table_file import from_parquet, to_parquet

LINE = b'{"id": "a", "text": "The lighthouse"}'


def test_every_changed_bit_of_a_sealed_line_is_noticed_or_lies_in_the_name_of_its_checksum() -> None:
    whole = sealed(LINE)
    assert json.loads(whole)["text"] == "The lighthouse"
    assert unsealed(whole) == LINE
    for place in range(len(whole)):
        for bit in range(8):
            changed = bytearray(whole)
            changed[place] ^= 1 << bit
            if len(LINE) - 1 <= place < len(LINE) - 1 + len(SEAL):
                assert unsealed(bytes(changed)) is None
            else:
                with pytest.raises(ValueError, match="does not match its checksum"):
                    unsealed(bytes(changed))


def test_a_line_whose_checksum_has_another_name_is_damaged(tmp_path: Path) -> None:
    run = Run.planned(str(tmp_path / "run"), MANIFEST).made()
    job_id = make_record("fox").job_id
    run.write_error(job_id, failed_line("reason"))
    [path] = (tmp_path / "run" / "errors").iterdir()
    path.write_bytes(path.read_bytes().replace(b"checksum", b"chucksum"))
    assert run.error(job_id) is None
    assert list(run.damaged.values()) == ["found no checksum"]


def test_a_changed_letter_of_a_result_is_named_and_its_job_runs_again(tmp_path: Path) -> None:
    run = Run.planned(str(tmp_path / "run"), MANIFEST).made()
    job_id = make_record("fox").job_id
    run.write_error(job_id, failed_line("reason"))
    [path] = (tmp_path / "run" / "errors").iterdir()
    assert run.error(job_id) is not None
    path.write_bytes(path.read_bytes().replace(b"reason", b"season"))
    assert run.error(job_id) is None
    assert list(run.damaged.values()) == ["found content that does not match its checksum"]


def test_a_changed_bit_of_the_table_of_jobs_is_never_another_prompt(tmp_path: Path) -> None:
    records = [make_record("fox"), make_record("dog")]
    data = to_parquet(records, "run-1")
    num_noticed = 0
    for place in range(0, len(data), 3):
        changed = bytearray(data)
        changed[place] ^= 1
        try:
            assert from_parquet(bytes(changed), "run-1") == records
        except (ValueError, OSError):
            num_noticed += 1
    assert num_noticed > 50


def test_a_table_of_another_run_is_refused(tmp_path: Path) -> None:
    run = Run.planned(str(tmp_path / "run"), MANIFEST).made()
    other = to_parquet([make_record("fox")], "run-of-another")
    Store(str(tmp_path / "run")).write("jobs.parquet", other)
    with pytest.raises(RunError, match=f'jobs of run "run-of-another", expected those of {MANIFEST.run_id}'):
        run.jobs()
