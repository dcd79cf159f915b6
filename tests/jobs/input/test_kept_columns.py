"""Unknown fields of a line are told of, or travel with its job; a line without a name gets one."""

from __future__ import annotations

import datetime
import json
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from swiftbatch.jobs.input.line_parsing import JobLine
from swiftbatch.jobs.input.parquet_rows import Columns
from swiftbatch.jobs.input.reader import JobReader, job_lines
from swiftbatch.jobs.input.rejects import Reject
from tests.jobs.input.job_lines import CHAT, GOOD, batch

KEEPING = Columns(keeps_others=True)


def read(path: Path, columns: Columns = KEEPING) -> tuple[JobReader, list[JobLine], list[Reject]]:
    reader = JobReader(1, columns)
    found = [line for _, line in job_lines([str(path)], reader)]
    return reader, found, list(reader.rejects)


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def kept_of(line: JobLine) -> Any:
    return None if line.kept is None else json.loads(line.kept)


def test_metadata_of_every_form_of_line_travel_unchanged(tmp_path: Path) -> None:
    values: list[Any] = [{"a": "b"}, {"a": {"b": [1, 2.0, None]}}, {}, "text", None]
    lines = [GOOD | {"custom_id": str(number), "metadata": value} for number, value in enumerate(values)]
    lines += [CHAT | {"metadata": {"n": 1}}, batch({"prompt": "x", "metadata": {"n": 2}})]
    _, found, rejects = read(write(tmp_path / "jobs.jsonl", *lines), Columns())
    assert rejects == []
    expected = [*({"metadata": value} for value in values[:-1]), None, {"metadata": {"n": 1}}, {"metadata": {"n": 2}}]
    assert [kept_of(line) for line in found] == expected
    assert [line.without_effect for line in found] == [()] * len(found)


def test_metadata_change_no_job_and_no_seed(tmp_path: Path) -> None:
    jobs = []
    for value in ({"a": 1}, {"a": 2}, None):
        _, [line], _ = read(write(tmp_path / "jobs.jsonl", GOOD | {"metadata": value, "other": value}))
        [job] = line.jobs([5])
        jobs.append((job, job.job_id("f1")))
    assert jobs[0] == jobs[1] == jobs[2]


def test_what_is_too_large_or_no_json_is_a_reject(tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    large = {"custom_id": "large", "prompt": "x", "metadata": {"a": "x" * 70_000}}
    path.write_text('{"prompt": "x", "metadata": {"a": 1}}\n' + json.dumps(large) + '\n{"prompt": "x", "a": NaN}\n')
    _, found, rejects = read(path)
    assert len(found) == 1
    assert rejects[0].reason == "field 'metadata': found 70009 bytes of JSON, expected at most 65536"
    assert rejects[1].reason.startswith("kept columns: found ")


def test_an_unknown_field_is_a_reject_unless_it_is_kept_and_then_counted(tmp_path: Path) -> None:
    line = {"custom_id": "a", "prompt": "x", "source": "book", "score": 1.0, "tags": ["a"], "nothing": None}
    path = write(tmp_path / "jobs.jsonl", line, batch({"prompt": "x"}) | {"source": "b"}, batch({"promt": "x"}))
    assert [reject.line_number for reject in read(path, Columns())[2]] == [1, 2, 3]
    reader, found, [reject] = read(path)
    expected = {"source": "book", "score": 1.0, "tags": ["a"]}
    assert [kept_of(each) for each in found] == [{"columns": expected}, {"columns": {"source": "b"}}]
    assert reader.kept_columns == {"source": 2, "score": 1, "tags": 1}
    assert "did you mean prompt?" in reject.reason
    assert found[0].without_effect == ()


def test_a_field_that_other_programs_have_is_never_only_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "jobs.jsonl", GOOD | {"watermarking": True}, GOOD | {"user": "somebody"})
    _, [line], [reject] = read(path)
    assert (line.without_effect, line.kept) == (("user",), None)
    assert "watermarking" in reject.reason


def test_columns_of_a_table_are_kept_as_json_has_them_and_bytes_are_told_of(tmp_path: Path) -> None:
    data: dict[str, Any] = {
        "question": ["Once", "Twice"],
        "prompt": ["-", "-"],
        "when": [datetime.datetime(2026, 1, 2, 3, 4), None],
        "share": pa.array([0.8, float("nan")], pa.float32()),
        "shares": pa.array([[0.1], None], pa.list_(pa.float32())),
        "at": pa.array([1_500, None], pa.timestamp("ns", "UTC")),
        "lasts": pa.array([1_500_000_007, None], pa.duration("ns")),
        "price": [Decimal("123456789012345678.10"), Decimal("2.00")],
        "whole": [1.0, 2.0],
        "tags": [["a", "b"], []],
        "nested": [{"a": 1, "b": None}, None],
        "image": [{"bytes": b"\xff", "path": "a.png"}, None],
    }
    path = tmp_path / "data.parquet"
    parquet.write_table(pa.table(data), path)
    _, found, rejects = read(path, replace(Columns.parse(["prompt=question"]), keeps_others=True))
    assert rejects == []
    first, second = (kept_of(line)["columns"] for line in found)
    assert first == {
        **{"prompt": "-", "when": "2026-01-02T03:04:00", "share": 0.8, "shares": [0.1], "whole": 1.0},
        **{"at": "1970-01-01T00:00:00.000001+00:00", "lasts": 1.5, "price": "123456789012345678.10"},
        **{"tags": ["a", "b"], "nested": {"a": 1, "b": None}},
    }
    assert second == {"prompt": "-", "price": "2.00", "whole": 2.0, "tags": []}
    assert isinstance(first["whole"], float)
    assert [line.without_effect for line in found] == [("image",)] * 2
    assert [line.prompts for line in found] == [("Once",), ("Twice",)]


def test_a_short_line_without_custom_id_is_named_after_file_and_line_also_once_the_file_has_grown(
    tmp_path: Path,
) -> None:
    lines: list[dict[str, Any]] = [{"prompt": "x"}, GOOD, {"prompt": "y", "custom_id": None}]
    reader, found, _ = read(write(tmp_path / "jobs.jsonl", *lines))
    assert [line.custom_id for line in found] == ["jobs.jsonl:1", "good", "jobs.jsonl:3"]
    assert (reader.num_named, reader.example) == (2, "jobs.jsonl:1")
    _, grown, _ = read(write(tmp_path / "jobs.jsonl", *lines, {"prompt": "z"}))
    assert [line.custom_id for line in grown] == [*(line.custom_id for line in found), "jobs.jsonl:4"]
    assert [line.sampling["seed"] for line in grown[:3]] == [line.sampling["seed"] for line in found]


@pytest.mark.parametrize("changes", [{"custom_id": None}, {"custom_id": ""}])
def test_a_line_of_openai_batch_needs_its_custom_id(tmp_path: Path, changes: dict[str, Any]) -> None:
    _, found, [reject] = read(write(tmp_path / "jobs.jsonl", batch({"prompt": "x"}) | changes))
    assert found == []
    assert "'custom_id'" in reject.reason
