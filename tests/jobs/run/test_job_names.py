from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.run.job_index import job_entries
from swiftbatch.jobs.run.run import Run
from tests.jobs.run.run_parts import MANIFEST, make_record


def choice(index: int) -> JobRecord:
    record = make_record("twice")
    job = record.job.model_copy(update={"choice_index": index, "num_choices": 2})
    return replace(record, job_id=job.job_id("f1"), job=job)


def test_jobs_are_named_as_they_name_themselves(tmp_path: Path) -> None:
    run = Run.planned(str(tmp_path / "run"), MANIFEST).made()
    first = make_record("first")
    run.add_jobs([first, choice(0), choice(1), make_record("[1]\n")])
    run.add_jobs([replace(first, job_id="first-longer", supersedes=first.job_id), make_record("later")])
    found = list(job_entries(run.store))
    assert [(each.job_id, each.name) for each in found] == [(each.job_id, each.job.name) for each in run.jobs()]
    assert [each.name for each in found] == ["first", "twice[0]", "twice[1]", "[1]\n", "later"]
    assert found[0].job_id == "first-longer"
