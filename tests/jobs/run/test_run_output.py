from __future__ import annotations

import errno
import io
import json
import tempfile
import threading
from typing import IO, Any

import pytest
from pyarrow import parquet

from swiftbatch.jobs.run.output_table import METRIC_COLUMNS, OWN_COLUMNS, table_file
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import NUM_READ_AHEAD
from swiftbatch.jobs.storage.local_folder import LocalFolder
from swiftbatch.jobs.storage.store import Store, StoreError
from tests.jobs.run.run_parts import make_record, write_result


def finished_line(custom_id: str, text: str, metrics: dict[str, Any]) -> dict[str, Any]:
    body = {
        "choices": [{"text": text, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8},
        "metrics": metrics,
    }
    return {"custom_id": custom_id, "response": {"body": body}, "error": None}


def failed_line(custom_id: str, code: str) -> dict[str, Any]:
    return {"custom_id": custom_id, "response": None, "error": {"code": code, "message": "why"}}


def read_table(store: Store) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = parquet.read_table(io.BytesIO(store.read("output.parquet") or b"")).to_pylist()
    return rows


def test_output_holds_every_finished_and_failed_job_in_input_order(run: Run) -> None:
    records = [make_record(custom_id) for custom_id in ("d", "c", "b", "a", "pending")]
    run.add_jobs(records)
    write_result(run, records[3].job_id, finished_line("a", "A \u2028 B\n", {"num_drafts": 2, "speed": 1, "note": "x"}))
    run.write_error(records[2].job_id, failed_line("b", "cancelled"))
    run.write_error(records[1].job_id, failed_line("c", "attempts_exhausted"))
    write_result(
        run, records[0].job_id, finished_line("d", "D", {"speed": 0.5, "text": 7, "error_code": 1, "gone": None})
    )
    run.write_error(records[0].job_id, failed_line("d", "too early"))
    run.write_output()
    lines = run.store.read("output.jsonl").decode().splitlines()
    assert [json.loads(line)["custom_id"] for line in lines] == ["d", "c", "b", "a"]
    rows = read_table(run.store)
    assert [row["status"] for row in rows] == ["finished", "failed", "cancelled", "finished"]
    assert [row["text"] for row in rows] == ["D", None, None, "A \u2028 B\n"]
    assert [row["speed"] for row in rows] == [0.5, None, None, 1.0]
    assert [row["num_drafts"] for row in rows] == [None, None, None, 2]
    assert [row["error_code"] for row in rows] == [None, "attempts_exhausted", "cancelled", None]
    assert set(rows[0]) == {
        *OWN_COLUMNS,
        *METRIC_COLUMNS,
        "speed",
    }
    assert all(row["reasoning_content"] is None and row["logprobs"] is None for row in rows)


def test_a_table_has_the_calls_of_a_chat_as_json(run: Run) -> None:
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    records = [make_record(name) for name in "ab"]
    run.add_jobs(records)
    for record, message in zip(records, ({"content": None, "tool_calls": calls}, {"content": "Yes"}), strict=True):
        line = finished_line(record.job.custom_id, "", {})
        line["response"]["body"]["choices"] = [{"message": message, "finish_reason": "tool_calls"}]
        write_result(run, record.job_id, line)
    run.write_output()
    first, second = read_table(run.store)
    assert (first["text"], json.loads(first["tool_calls"])) == ("", calls)
    assert (second["text"], second["tool_calls"]) == ("Yes", None)


def test_a_table_has_what_a_chat_thought_and_its_log_probabilities(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "swiftbatch.jobs.run.table_rows.MAX_CHARACTERS_PER_GROUP", 50
    )  # long rows are written one by one
    logprobs = {"content": [{"token": "\ud83d", "logprob": -0.5}], "refusal": None}
    message = {"role": "assistant", "reasoning_content": "well\udce9", "content": "Yes"}
    records = [make_record(name) for name in "ab"]
    run.add_jobs(records)
    for record in records:
        line = finished_line(record.job.custom_id, "", {})
        line["response"]["body"]["choices"] = [{"message": message, "logprobs": logprobs, "finish_reason": "stop"}]
        write_result(run, record.job_id, line)
    run.write_output()
    rows = read_table(run.store)
    assert [(row["text"], row["reasoning_content"]) for row in rows] == [("Yes", "well\\udce9")] * 2
    assert json.loads(rows[0]["logprobs"])["content"][0]["logprob"] == -0.5
    table = parquet.ParquetFile(io.BytesIO(run.store.read("output.parquet") or b""))
    assert table.num_row_groups == 2


def test_output_of_a_run_without_results_is_empty_and_readable(run: Run) -> None:
    run.add_jobs([make_record("a")])
    run.write_output()
    assert run.store.read("output.jsonl") == b""
    assert read_table(run.store) == []


def test_a_table_has_the_same_columns_whatever_became_of_its_jobs(run: Run) -> None:
    """Programs read tables of many nights and need every column."""
    records, schemas = [make_record(name) for name in "ab"], []
    run.add_jobs(records)
    for step in range(3):
        if step == 1:
            run.write_error(records[0].job_id, failed_line("a", "attempts_exhausted"))
        if step == 2:
            numbers = {name: 1.0 if kind == "float64" else 1 for name, kind in METRIC_COLUMNS.items()}
            write_result(run, records[1].job_id, finished_line("b", "B", numbers | {"distinct_1": None}))
        run.write_output()
        schemas.append(parquet.read_schema(io.BytesIO(run.store.read("output.parquet") or b"")))
    assert schemas[0] == schemas[1] == schemas[2]
    assert schemas[0].names == [*OWN_COLUMNS, *METRIC_COLUMNS]


def test_output_is_written_again_after_more_results(run: Run) -> None:
    records = [make_record(f"job {number}") for number in range(150)]
    run.add_jobs(records)
    for num_finished in (1, 150):
        for record in records[:num_finished]:
            write_result(run, record.job_id, finished_line(record.job.custom_id, "x", {}))
        run.write_output()
        assert [row["custom_id"] for row in read_table(run.store)] == [
            f"job {number}" for number in range(num_finished)
        ]


def test_results_are_read_several_at_once_in_order_and_not_far_ahead(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [make_record(f"job-{i}") for i in range(NUM_READ_AHEAD + 20)]
    run.add_jobs(records)
    for record in records:
        write_result(run, record.job_id, finished_line(record.job.custom_id, "text", {}))
    real, paths, others_are_read = LocalFolder.read, list[str](), threading.Event()

    def read(folder: LocalFolder, path: str) -> bytes | None:
        """Read the output; the first result comes after four others."""
        if path.startswith("results/"):
            paths.append(path)
            if path == paths[0]:
                assert others_are_read.wait(60)
            elif len(paths) > 4:
                others_are_read.set()
        return real(folder, path)

    monkeypatch.setattr(LocalFolder, "read", read)
    lines = run.output_lines()
    first = next(lines)
    assert len(paths) <= NUM_READ_AHEAD
    found = [first, *lines]
    assert [line["custom_id"] for _, line in found if line is not None] == [r.job.custom_id for r in records]


def test_an_error_that_names_what_is_not_utf_8_has_its_place_in_both_files(run: Run) -> None:
    record = make_record("a")
    run.add_jobs([record])
    line = failed_line("a", "attempts_failed")
    line["error"]["message"] = "no file caf\udce9.bin"
    run.write_error(record.job_id, line)
    run.write_output()
    assert b"caf\\udce9.bin" in (run.store.read("output.jsonl") or b"")
    assert read_table(run.store)[0]["error_message"] == "no file caf\\udce9.bin"


def test_a_table_that_has_no_room_for_its_temporary_file_is_refused_as_that(monkeypatch: pytest.MonkeyPatch):
    def no_place() -> IO[bytes]:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    def full() -> IO[bytes]:
        return open("/dev/full", "w+b")

    monkeypatch.setattr("swiftbatch.jobs.storage.store.MEMORY_BYTES", 1)
    for opened, reason in ((full, "No space left"), (no_place, "No usable temporary")):
        monkeypatch.setattr(tempfile, "TemporaryFile", lambda opened=opened, **_: opened())
        line = {"custom_id": "a", "response": None, "error": {"code": "failed", "message": "it failed"}}
        refused = pytest.raises(StoreError, match=f"cannot write a temporary file: .*{reason}.*; make room there")
        with refused, table_file([[(make_record("a"), line)]]):
            pass
