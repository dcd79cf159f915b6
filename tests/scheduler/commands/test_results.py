from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyarrow import parquet

from swiftbatch.jobs.run.run import Run
from tests.jobs.storage.stumbling_disk import stumble
from tests.scheduler.commands.command_parts import finish, invoke, refusal


def test_results_reads_and_writes_nothing_into_the_run(run: Run, tmp_path: Path) -> None:
    finish(run, "a", "text of a")
    run.store.write("output.jsonl", b"what the driver wrote\n")
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    assert json.loads(invoke("results", run.store.uri).stdout)["custom_id"] == "a"
    assert invoke("results", run.store.uri, "--format", "parquet", "--output", str(tmp_path / "t")).exit_code == 0
    assert len(parquet.read_table(tmp_path / "t")) == 1
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == files
    assert run.store.read("output.jsonl") == b"what the driver wrote\n"


@pytest.mark.parametrize("words", [["results"], ["status"], ["status", "--watch"], ["tail", "a"], ["report"]])
def test_a_command_that_reads_goes_on_where_every_third_read_fails(
    run: Run, tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(run, "a", "text of a")
    words = [words[0], run.store.uri, *words[1:]]
    monkeypatch.chdir(tmp_path)
    expected = invoke(*words)
    failed = stumble(monkeypatch, 2, every=3)
    found = invoke(*words)
    assert failed
    assert (found.exit_code, found.output) == (expected.exit_code, expected.output) == (0, expected.output)


def test_results_come_in_input_order_in_both_formats(run: Run, tmp_path: Path) -> None:
    finish(run, "c", "text of c")
    finish(run, "a", "text of a")
    lines = [json.loads(line) for line in invoke("results", run.store.uri).output.splitlines()]
    assert [line["custom_id"] for line in lines] == ["a", "c"]
    target = tmp_path / "answers.parquet"
    assert invoke("results", run.store.uri, "--format", "parquet", "--output", str(target)).exit_code == 0
    assert parquet.read_table(target)["text"].to_pylist() == ["text of a", "text of c"]
    assert "/proc/x" in refusal("results", run.store.uri, "--output", "/proc/x")


def test_results_shows_the_first_lines_alone(run: Run, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        finish(run, name, f"text of {name}")
    lines = invoke("results", run.store.uri, "--head", "2").stdout.splitlines()
    assert [json.loads(line)["custom_id"] for line in lines] == ["a", "b"]
    target = tmp_path / "answers.parquet"
    words = ("--format", "parquet", "--output", str(target))
    assert invoke("results", run.store.uri, "--head", "1", *words).exit_code == 0
    assert parquet.read_table(target)["text"].to_pylist() == ["text of a"]


def test_results_are_chosen_fields_or_conversations(run: Run, tmp_path: Path) -> None:
    finish(run, "a", "text of a")
    lines = invoke("results", run.store.uri, "--fields", "text, custom_id").stdout.splitlines()
    assert [json.loads(line) for line in lines] == [{"text": "text of a", "custom_id": "a"}]
    (line,) = invoke("results", run.store.uri, "--format", "chat").stdout.splitlines()
    assert [each["content"] for each in json.loads(line)["messages"]][1] == "text of a"
    target = tmp_path / "answers"
    for wrong in ("text,sauce", "text,text", ""):
        assert "--fields" in refusal("results", run.store.uri, "--fields", wrong, "--output", str(target))
    assert not target.exists()
