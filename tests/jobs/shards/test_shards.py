"""Shards are final, contain every ended line once, and share their columns."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import dataset

from swiftbatch.jobs.job import Job, JobRecord
from swiftbatch.jobs.run.result_files import SEGMENTS
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import RunError
from swiftbatch.jobs.run.shards import DATA, Shards, ShardSettings, ask_for_shards
from swiftbatch.jobs.run.table_rows import COLUMNS, arrow_schema, failed_row
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.jobs.storage.store import Store, StoreError
from tests.jobs.run.run_parts import FINISHED, write_result
from tests.jobs.shards.shard_parts import (
    all_rows,
    fail,
    files,
    finish,
    job_ids,
    leftovers,
    longer,
    make_run,
    records_of,
    rows_of,
    shards_of,
)

LINES = {"a": 1, "b": 3, "c": 1, "d": 1, "e": 2, "f": 1}


@pytest.mark.long
@settings(max_examples=15)
@given(data=st.data(), kind=st.sampled_from(["parquet", "jsonl"]), rows=st.integers(1, 5))
def test_in_whatever_order_jobs_end_and_drivers_follow_each_job_is_in_one_shard_and_none_changes(
    data: st.DataObject, kind: str, rows: int
) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        run = make_run(f"{folder}/run", LINES, f"{kind}:{rows}")
        records, epochs, seen = run.jobs(), itertools.count(2), dict[str, bytes]()
        shards = shards_of(run)
        for record in data.draw(st.permutations(records)):
            (fail if data.draw(st.integers(0, 5)) == 0 else finish)(run, record)
            if data.draw(st.booleans()):  # an ended or killed driver leaves the rest to the next
                shards = shards_of(run, next(epochs))
            if data.draw(st.booleans()):
                shards.catch_up(is_end=False)
                assert all(len(found) <= max(rows, 3) for found in all_rows(run.store))
                assert {name: files(run.store)[name] for name in seen} == seen
                seen = files(run.store)
        shards.catch_up(is_end=True)
        assert {name: files(run.store)[name] for name in seen} == seen
        assert sorted(job_ids(all_rows(run.store))) == sorted(record.job_id for record in records)
        assert shards.catch_up(is_end=True) == ([], 0)
        assert shards_of(run, next(epochs)).catch_up(is_end=True) == ([], 0)


def test_choices_of_a_line_are_rows_of_one_shard_in_their_order(tmp_path: Path) -> None:
    run = make_run(str(tmp_path / "run"), {"a": 1, "b": 4, "c": 1}, "parquet:2")
    finish(run, *reversed(run.jobs()))
    shards_of(run).catch_up(is_end=True)
    found = [[(row["custom_id"], row["choice_index"]) for row in rows] for rows in all_rows(run.store)]
    assert found == [[("a", 0)], [("b", 0), ("b", 1), ("b", 2), ("b", 3)], [("c", 0)]]


def test_a_row_says_what_was_asked_for_and_how_it_ended(tmp_path: Path) -> None:
    run = make_run(str(tmp_path / "run"), {"a": 1, "b": 1}, "jsonl")
    first, second = run.jobs()
    finish(run, first)
    fail(run, second, code="cancelled", message="no file caf\udce9.bin")
    assert shards_of(run).catch_up(is_end=True)[0] == [(f"{DATA}/train-00000.jsonl", 2)]
    (rows,) = all_rows(run.store)
    asked: dict[str, Any] = {"choice_index": 0, "revision": 0, "prompt_ids": None, "messages": None, "seed": 0}
    asked |= {"max_tokens": 5, "temperature": 1.0, "prompt_tokens": 3, "token_ids_sha256": None}
    ends = [
        {"custom_id": "a", "status": "finished", "text": f"text of {first.job_id}", "finish_reason": "length"}
        | {"completion_tokens": 5, "error_code": None, "error_message": None, "prompt": "Once a"},
        {"custom_id": "b", "status": "cancelled", "text": None, "finish_reason": None, "prompt": "Once b"}
        | {"completion_tokens": None, "error_code": "cancelled", "error_message": "no file caf\\udce9.bin"},
    ]
    assert [{name: row[name] for name in asked | ends[0]} for row in rows] == [asked | end for end in ends]
    assert '"max_tokens": 5' in rows[0]["sampling"]


def test_all_shards_have_the_same_columns_whatever_is_null_in_them(tmp_path: Path) -> None:
    run = make_run(str(tmp_path / "run"), {"a": 1, "b": 1, "c": 1}, "parquet:1")
    finish(run, run.jobs()[0])
    fail(run, *run.jobs()[1:])
    shards_of(run).catch_up(is_end=True)
    found = dataset.dataset(str(tmp_path / "run" / DATA), format="parquet")
    assert [fragment.physical_schema for fragment in found.get_fragments()] == [arrow_schema(COLUMNS)] * 3
    assert all(field.nullable for field in arrow_schema(COLUMNS))
    table = found.to_table(use_threads=False)
    assert table.schema == arrow_schema(COLUMNS)
    assert table["status"].to_pylist() == ["finished", "failed", "failed"]
    assert not any(pa.types.is_null(field.type) for field in table.schema)


def test_thoughts_token_ids_and_log_probabilities_are_columns_also_of_chats(tmp_path: Path) -> None:
    run = make_run(str(tmp_path / "run"), {"a": 1}, "parquet")
    [record] = run.jobs()
    message = {"role": "assistant", "reasoning_content": "well", "content": "Yes"}
    choice = {"message": message, "logprobs": {"content": [{"token": "Y", "logprob": -0.5}]}, "finish_reason": "stop"}
    choice |= {"token_ids": [3, 4], "ignored_schema_keywords": ["uniqueItems"]}
    body = FINISHED["response"]["body"] | {"choices": [choice], "prompt_token_ids": [1, 2]}
    write_result(run, record.job_id, {"custom_id": "a", "response": {"body": body}, "error": None})
    shards_of(run).catch_up(is_end=True)
    [[row]] = all_rows(run.store)
    assert (row["text"], row["reasoning_content"]) == ("Yes", "well")
    assert json.loads(row["logprobs"]) == choice["logprobs"]
    assert (row["prompt_token_ids"], row["token_ids"]) == ([1, 2], [3, 4])
    assert row["ignored_schema_keywords"] == ["uniqueItems"]


def test_messages_keep_their_earlier_calls_and_thoughts() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said: list[dict[str, Any]] = [
        {"role": "user", "content": "Rain?", "name": "Ann"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
    ]
    sampling = SamplingParams(max_tokens=5, seed=0)
    job = Job(custom_id="a", url="/v1/chat/completions", messages=said, sampling=sampling)
    row = failed_row(JobRecord("a-1", job, 1, 3), "cancelled", "")
    found = pa.Table.from_pylist([row], schema=arrow_schema(COLUMNS)).to_pylist()[0]["messages"]
    kept = [{name: value for name, value in message.items() if value is not None} for message in found]
    said[1]["tool_calls"] = json.dumps([call])
    assert kept == said


def test_failed_lines_wait_for_the_end_so_that_those_tried_again_have_one_row(tmp_path: Path) -> None:
    run = make_run(str(tmp_path / "run"), {"a": 1, "b": 2}, "parquet:1")
    a, b, other = run.jobs()
    fail(run, a, b)
    finish(run, other)
    assert shards_of(run).catch_up(is_end=False) == ([], 0)
    run.clear_errors()
    finish(run, a, b)
    shards_of(run, 2).catch_up(is_end=True)
    found = [(row["custom_id"], row["status"], row["revision"]) for rows in all_rows(run.store) for row in rows]
    assert found == [("a", "finished", 0), ("b", "finished", 0), ("b", "finished", 0)]


def test_what_is_tried_again_after_the_end_has_a_row_more_with_the_next_revision(tmp_path: Path) -> None:
    run = make_run(str(tmp_path / "run"), {"a": 1, "b": 1}, "parquet:9")
    a, b = run.jobs()
    finish(run, a)
    fail(run, b)
    shards_of(run).catch_up(is_end=True)
    before = files(run.store)
    run.clear_errors()
    assert shards_of(run, 2).catch_up(is_end=False) == ([], 0)
    fail(run, b, message="why once more")  # unchanged, so nothing new
    assert shards_of(run, 3).catch_up(is_end=True) == ([], 0)
    finish(run, b)
    shards_of(run, 4).catch_up(is_end=True)
    assert files(run.store).items() >= before.items()
    found = [(row["custom_id"], row["status"], row["revision"]) for rows in all_rows(run.store) for row in rows]
    assert found == [("a", "finished", 0), ("b", "failed", 0), ("b", "finished", 1)]


def test_an_extended_job_has_a_row_for_each_length_that_was_final(tmp_path: Path) -> None:
    run = make_run(str(tmp_path / "run"), {"a": 1, "b": 1, "c": 1}, "parquet:1")
    a, b, c = run.jobs()
    finish(run, a)
    shards_of(run).catch_up(is_end=False)
    finish(run, b, c)  # interrupted before the shard
    run.add_jobs([longer(record, 9) for record in (a, b, c)])
    assert shards_of(run, 2).catch_up(is_end=False) == ([], 0)
    finish(run, longer(a, 9), longer(b, 9))
    fail(run, longer(c, 9))  # the shorter text stays
    shards_of(run, 3).catch_up(is_end=True)
    found = [
        (r["custom_id"], r["max_tokens"], r["revision"], r["status"]) for rows in all_rows(run.store) for r in rows
    ]
    assert found == [("a", 5, 0, "finished"), ("a", 9, 1, "finished"), ("b", 9, 0, "finished"), ("c", 5, 0, "finished")]
    run.clear_errors()
    finish(run, longer(c, 9))
    shards_of(run, 4).catch_up(is_end=True)
    assert [(r["max_tokens"], r["revision"]) for r in all_rows(run.store)[-1]] == [(9, 1)]


def test_more_lines_later_come_into_new_shards(tmp_path: Path) -> None:
    run = make_run(str(tmp_path / "run"), {"a": 1, "b": 1}, "parquet:9")
    finish(run, *run.jobs())
    shards_of(run).catch_up(is_end=True)
    before = files(run.store)
    run.add_jobs(records_of({"a": 1, "b": 1, "c": 1}))
    finish(run, run.jobs()[2])
    shards_of(run, 2).catch_up(is_end=True)
    assert files(run.store).items() >= before.items()
    assert [[row["custom_id"] for row in rows] for rows in all_rows(run.store)] == [["a", "b"], ["c"]]


def test_a_run_that_is_asked_for_shards_later_puts_all_into_them(tmp_path: Path) -> None:
    run = make_run(str(tmp_path / "run"), LINES, shards=None)
    finish(run, *run.jobs())
    assert Shards.of(run, 1, lambda: None) is None
    assert run.store.list("shards") == []
    ask_for_shards(run.store, ShardSettings.parse("parquet:4"))
    shards_of(run).catch_up(is_end=False)
    ask_for_shards(run.store, ShardSettings.parse("parquet:1"))
    shards_of(run, 2).catch_up(is_end=True)
    assert [len(rows) for rows in all_rows(run.store)] == [4, 4, 1]
    with pytest.raises(RunError, match=r"has shards of format parquet, found jsonl: use --output-shards parquet"):
        ask_for_shards(run.store, ShardSettings.parse("jsonl:1"))


def damage(store: Store, path: str) -> None:
    store.write(path, store.read(path).replace(b"text of", b"test of"))


def test_a_damaged_result_holds_up_its_line_alone_and_a_planned_shard_until_it_is_there_again(tmp_path: Path) -> None:
    run = make_run(str(tmp_path / "run"), {"a": 1, "b": 1, "c": 1, "d": 1}, "jsonl:2")
    a, b, c, d = run.jobs()
    finish(run, a, b, c, d)
    damage(run.store, f"{SEGMENTS}/{a.job_id}.seg")
    shards_of(run).catch_up(is_end=False)
    assert [[row["custom_id"] for row in rows] for rows in all_rows(run.store)] == [["b"], ["c", "d"]]
    before = files(run.store)
    run.store.delete(f"{DATA}/train-00001.jsonl")
    damage(run.store, f"{SEGMENTS}/{d.job_id}.seg")
    shards_of(run, 2).catch_up(is_end=False)
    assert list(files(run.store)) == ["train-00000.jsonl"]
    held = Run.open(run.store.uri)
    assert sorted(held.ended_jobs(held.job_index())[0][::2]) == [1, 2]
    assert len(held.set_damaged_aside([a.job_id, d.job_id])) == 2
    finish(run, a, d)
    shards_of(run, 3).catch_up(is_end=True)
    assert {name: files(run.store)[name] for name in before} == before
    assert sorted(job_ids(all_rows(run.store))) == sorted(record.job_id for record in run.jobs())


def test_large_results_close_a_shard_before_its_rows_do(tmp_path: Path) -> None:
    run = make_run(str(tmp_path / "run"), dict.fromkeys("abcde", 1), "parquet:100")
    finish(run, *run.jobs())
    first = run.jobs()[0]
    size = run.ended_sizes()[0][first.job_id] + len(first.job.model_dump_json()) + len("\n")
    written, num_waiting = shards_of(run).catch_up(is_end=False, max_bytes=2 * size)
    assert [shard.num_rows for shard in written] == [2, 2]
    assert num_waiting == 1


def test_a_full_disk_for_temporary_files_is_one_line_and_the_next_try_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(str(tmp_path / "run"), LINES, "parquet:2")
    finish(run, *run.jobs())
    shards = shards_of(run)
    with monkeypatch.context() as patch:
        patch.setattr(
            "swiftbatch.jobs.run.shards.write_shard", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left"))
        )
        with pytest.raises(StoreError, match=r"cannot write a temporary file: .*No space left; make room there"):
            shards.catch_up(is_end=True)
    with monkeypatch.context() as patch:  # the plan is written, the shard is not
        patch.setattr(type(run.store), "write_new_from", lambda *_: (_ for _ in ()).throw(StoreError("the store")))
        with pytest.raises(StoreError):
            shards.catch_up(is_end=True)
    shards.catch_up(is_end=True)
    assert sorted(job_ids(all_rows(run.store))) == sorted(record.job_id for record in run.jobs())
    assert leftovers(tmp_path) == []


def test_in_a_bucket_shards_are_the_same_bytes(s3_uri: str, tmp_path: Path) -> None:
    stores = []
    for uri in (f"{s3_uri}/run", str(tmp_path / "run")):
        run = make_run(uri, LINES, "parquet:3")
        finish(run, *run.jobs()[:6])
        shards_of(run).catch_up(is_end=False)
        finish(run, *run.jobs()[6:])
        shards_of(run, 2).catch_up(is_end=True)
        stores.append(run.store)
    assert files(stores[0]) == files(stores[1])
    assert sorted(job_ids(all_rows(stores[0]))) == sorted(record.job_id for record in Run.open(s3_uri + "/run").jobs())
    assert b"path: data/*.parquet" in (stores[0].read("shards/README.md") or b"")
    assert [len(rows_of(name, data)) for name, data in files(stores[0]).items()] == [1, 3, 2, 3]


@pytest.mark.parametrize("text", ["", "csv", "parquet:", "parquet:0", "parquet:x", "jsonl:1000001", "jsonl:1:2"])
def test_what_is_no_format_is_refused_with_what_was_expected(text: str) -> None:
    with pytest.raises(
        ValueError, match="expected parquet or jsonl, and behind a colon 1 to 1,000,000 rows"
    ) as refused:
        ShardSettings.parse(text)
    assert f"found {text!a}" in str(refused.value)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_kept_columns_are_columns_of_all_shards_and_later_lines_may_bring_more(tmp_path: Path, kind: str) -> None:
    def keeping(records: list[JobRecord], *kept: dict[str, Any]) -> list[JobRecord]:
        return [replace(record, kept=json.dumps({"columns": each})) for record, each in zip(records, kept, strict=True)]

    run = make_run(str(tmp_path / "run"), {}, f"{kind}:1")
    run.add_jobs(keeping(records_of({"a": 1, "b": 1}), {"source": "book", "text": "mine"}, {"score": 1}))
    finish(run, *run.jobs())
    shards_of(run).catch_up(is_end=True)
    kept = ("source", "input_text", "score")
    assert [[row[name] for name in kept] for rows in all_rows(run.store) for row in rows] == [
        ["book", "mine", None],
        [None, None, 1],
    ]
    before = files(run.store)
    run.add_jobs(keeping(records_of({"c": 1}), {'odd: "name"': [0.5], "score": "high"}))
    finish(run, run.jobs()[2])
    shards_of(run, 2).catch_up(is_end=True)
    assert files(run.store).items() >= before.items()
    assert all_rows(run.store)[2][0]['odd: "name"'] == [0.5]
    assert [all_rows(run.store)[2][0][name] for name in ("score", "score_json")] == [None, '"high"']
    for name in before:
        run.store.delete(f"{DATA}/{name}")
    shards_of(run, 3).catch_up(is_end=True)
    assert files(run.store).items() >= before.items()  # a deleted one comes back as it was
    card = run.store.read("shards/README.md").decode()
    features = yaml.safe_load(card.split("---")[1])["dataset_info"]["features"]
    assert features[-2:] == [{"name": 'odd: "name"', "list": "float64"}, {"name": "score_json", "dtype": "string"}]
    assert {"name": "score", "dtype": "int64"} in features
