from __future__ import annotations

from pathlib import Path

from swiftbatch.jobs.run.run_records import WorkerStatus
from swiftbatch.scheduler.demo.__main__ import NUM_TOKENS, DemoKill, kill_lines, prepare
from swiftbatch.scheduler.runs.submission import LineNotes, make_records
from swiftbatch.worker.model.model_files import ModelFiles
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.jobs.input.job_lines import read_jobs


def test_the_demos_jobs_are_all_taken_and_long(tmp_path: Path, embedded_files: ModelFiles) -> None:
    jobs, rejects = read_jobs(str(prepare(tmp_path / "demo-run")), 0)
    notes = LineNotes()
    records = list(make_records(jobs, notes, embedded_files, TextCodec(embedded_files)))
    assert not rejects
    assert not notes.rejects
    assert len(records) >= 4
    assert all(record.job.sampling.max_tokens == NUM_TOKENS == 2000 for record in records)


def test_every_demo_starts_afresh_and_deletes_no_other_folder(tmp_path: Path) -> None:
    folder = tmp_path / "demo-run"
    prepare(folder)
    (folder / "results").mkdir()
    prepare(folder)
    assert [path.name for path in folder.iterdir()] == ["jobs.jsonl"]
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "keep").touch()
    prepare(foreign)
    assert (foreign / "keep").exists()


def test_the_summary_says_what_was_killed_and_where_it_went_on() -> None:
    calm = {"num_attempts": 1, "num_recovered_tokens": 0, "num_recomputed_tokens": 0}
    hit = {"num_attempts": 2, "num_recovered_tokens": 950, "num_recomputed_tokens": 30}
    kill = DemoKill(WorkerStatus(id="w1", host="h", pid=77, jobs=("a",)), 4000)
    lines = kill_lines(kill, {"a": {"metrics": hit}, "b": {"metrics": calm}})
    assert "worker w1 (process 77) was killed" in lines[0]
    assert lines[1:] == [
        "  a: went on at token 950 of 2,000 (950 recovered from its token log, about 30 computed again)"
    ]
    assert "no worker was killed" in kill_lines(None, {})[0]
