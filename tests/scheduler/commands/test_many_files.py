from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from swiftbatch.jobs.input.parquet_rows import Columns
from swiftbatch.jobs.run.run import Run
from swiftbatch.scheduler.driver.queue_loading import write_cancelled
from swiftbatch.scheduler.runs.run_settings import Settings
from swiftbatch.scheduler.runs.submission import Submission, submission
from tests.scheduler.commands.command_parts import invoke, job, refusal, write_jobs


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    write_jobs(tmp_path / "b.jsonl", job("b1"), "{broken", job("too-long", max_tokens=5000))
    write_jobs(tmp_path / "a.jsonl", job("a1"), job("b1"), job("a2"))
    return str(tmp_path / "run")


def submit(jobs: list[str], place: str, model: Path, *said: str) -> Submission:
    columns = Columns.parse(said)
    with submission(jobs, place, Settings({"model": str(model)}), columns=columns) as submitted:
        return submitted


def names(run: Run) -> list[str]:
    return [record.job.custom_id for record in run.jobs()]


def test_files_are_one_submission_and_later_files_come_behind(place: str, tiny_model: Path) -> None:
    first = submit(["b.jsonl", "a.jsonl"], place, tiny_model)
    assert names(first.run) == ["b1", "a1", "a2"]
    assert [entry.line_number for entry in first.jobs.entries()] == [1, 4, 6]
    kept = [(reject.file, reject.line_number, reject.custom_id) for reject in Run.open(place).rejects()]
    assert kept == [("b.jsonl", 2, None), ("b.jsonl", 3, "too-long"), ("a.jsonl", 2, "b1")]
    write_jobs(Path("c.jsonl"), job("c1"), job("a1", max_tokens=21))
    later = submit(["*.jsonl"], place, tiny_model)
    assert names(later.run) == ["b1", "a1", "a2", "c1"]  # a.jsonl's b1 was refused before and is the same job
    assert [(reject.file, reject.line_number) for reject in later.rejects] == [
        ("b.jsonl", 1),
        ("b.jsonl", 2),
        ("b.jsonl", 3),
        ("c.jsonl", 2),
    ]
    again = submit(["c.jsonl"], place, tiny_model)
    assert [(reject.file, reject.line_number) for reject in again.rejects] == [(None, 2)]


def test_a_job_of_one_file_beside_a_reject_of_another_at_the_same_line(place: str, tiny_model: Path) -> None:
    write_jobs(Path("x.jsonl"), job("x", n=2))
    write_jobs(Path("y.jsonl"), job("y", n=2))
    submit(["x.jsonl", "y.jsonl"], place, tiny_model)
    write_jobs(Path("y.jsonl"), job("y", n=3))
    again = submit(["x.jsonl", "y.jsonl"], place, tiny_model)
    assert [(reject.file, reject.line_number, reject.custom_id) for reject in again.rejects] == [("y.jsonl", 1, "y")]
    assert [entry.name for entry in again.jobs.entries()] == ["x[0]", "x[1]"]


def test_what_is_told_names_the_files(place: str, tiny_model: Path) -> None:
    made = submit(["a.jsonl", "b.jsonl"], place, tiny_model)
    write_cancelled(made.run, made.jobs.entries())
    told = invoke("submit", "a.jsonl", "b.jsonl", "--run", place)
    assert told.exit_code == 1
    assert "rejected b.jsonl:1 (b1): field 'custom_id': found \"b1\" again (first in a.jsonl:2)" in told.stderr
    assert "rejected b.jsonl:2: not JSON" in told.stderr
    shown = map(json.loads, invoke("submit", "a.jsonl", "b.jsonl", "--run", place, "--json").output.splitlines())
    events = [(event["file"], event["line_number"]) for event in shown if event["event"] == "line_rejected"]
    assert events == [("b.jsonl", 1), ("b.jsonl", 2), ("b.jsonl", 3)]
    alone = invoke("submit", "b.jsonl", "--run", place)
    assert "rejected line 2: not JSON" in alone.stderr
    assert refusal("submit", "a.jsonl", "b.jsonl", "--run", place, "--strict").startswith(
        "swiftbatch: b.jsonl:1: field"
    )


def test_a_data_set_is_submitted_by_its_columns(place: str, tiny_model: Path) -> None:
    parquet.write_table(pa.table({"text": ["Once", None, "Twice"], "label": [1, 2, 3]}), "data.parquet")
    assert 'unknown columns "text", "label"' in refusal("submit", "data.parquet", "--run", place)
    assert 'unknown field "promt"' in refusal("submit", "data.parquet", "--run", place, "--column", "promt=text")
    made = submit(["data.parquet"], place, tiny_model, "prompt=text")
    assert names(made.run) == ["data.parquet:1", "data.parquet:3"]
    assert made.without_effect == {"label": 2}
    write_cancelled(made.run, made.jobs.entries())
    told = invoke("submit", "data.parquet", "--run", place, "--column", "prompt=text").output
    assert "rejected line 2 (data.parquet:2): fields 'prompt' and 'messages': found neither" in told
    assert "fields without effect here: label (2 lines)" in told
    told = invoke("submit", "data.parquet", "--run", place, "--column", "prompt=text", "--keep-columns").output
    assert "columns that are no field travel to the output: label (2 lines)" in told
    assert "2 lines without custom_id: named after file and line, such as data.parquet:1" in told


def test_nothing_of_any_file_is_submitted_where_one_can_t_be_read(place: str, tiny_model: Path) -> None:
    Path("torn.parquet").write_bytes(b"PAR1 and no more")
    for other in ("torn.parquet", "absent.jsonl", "none-*"):
        refusal("submit", "a.jsonl", other, "--run", place, "--model", str(tiny_model))
    assert not Path(place).exists()
