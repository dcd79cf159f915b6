"""Damage to a segment of results costs only its own job."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.json_records import dump_line, sealed, unsealed
from swiftbatch.jobs.run import result_files
from swiftbatch.jobs.run import result_files as segment_format
from swiftbatch.jobs.run.output_line import LINE_ID, line_id
from swiftbatch.jobs.run.result_files import SEGMENTS, ResultSegment
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.storage.local_folder import LocalFolder
from swiftbatch.scheduler.display.progress_line import damage_lines
from swiftbatch.scheduler.driver.queue_loading import count_jobs, load_queue
from tests.jobs.run.run_parts import FINISHED, MANIFEST, failed_line, make_record, write_result

NAMES = "abcde"


def line_of(record: JobRecord) -> dict[str, Any]:
    return FINISHED | {"custom_id": record.job.custom_id, "id": line_id(record.job_id)}


def segment_of(records: Iterable[JobRecord]) -> ResultSegment:
    return ResultSegment((record.job_id, line_of(record)) for record in records)


def make_run(uri: str) -> tuple[Run, list[JobRecord]]:
    """Make five jobs: two in one segment, one in another, one alone, one with an error."""
    run = Run.planned(uri, MANIFEST).made()
    records = [make_record(name) for name in NAMES]
    run.add_jobs(records)
    run.write_segment("w1-x-0001", segment_of(records[:2]))
    run.write_segment("w2-y-0001", segment_of([records[2]]))
    write_result(run, records[3].job_id, FINISHED | {"custom_id": "d"})
    run.write_error(records[4].job_id, failed_line("cancelled") | {"custom_id": "e"})
    return run, records


@pytest.fixture
def run(run_uri: str) -> tuple[Run, list[JobRecord]]:
    return make_run(run_uri)


@pytest.fixture(params=["local", "s3"])
def run_uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "run") if request.param == "local" else str(request.getfixturevalue("s3_uri"))


def test_results_and_errors_are_read_counted_and_put_out_together(run: tuple[Run, list[JobRecord]]) -> None:
    made, records = run
    opened = Run.open(made.store.uri)
    assert opened.ended()[0] == {record.job_id for record in records[:4]}
    assert opened.ended()[1] == {records[4].job_id}
    assert count_jobs(opened) == {"pending": 0, "running": 0, "finished": 4, "failed": 0, "cancelled": 1}
    assert [line["custom_id"] for line in opened.joined_lines()] == list(NAMES)
    assert opened.result(records[1].job_id)["custom_id"] == "b"
    lines = opened.result_lines([records[3].job_id, records[2].job_id, "none", records[0].job_id])
    assert [line and line["custom_id"] for line in lines] == ["d", "c", None, "a"]
    queue = load_queue(Run.open(made.store.uri), 5)
    assert queue.counts() == {"pending": 0, "running": 0, "finished": 4, "failed": 0, "cancelled": 1}
    assert queue.num_generated_tokens == 4 * 5


def test_a_run_sees_results_that_come_while_it_is_open_and_counts_a_job_with_two_once(
    run: tuple[Run, list[JobRecord]],
) -> None:
    made, records = run
    opened = Run.open(made.store.uri)
    assert opened.result(records[4].job_id) is None
    made.write_segment("w3-z-0001", segment_of([records[4], records[0]]))
    assert opened.result(records[4].job_id) is not None
    assert opened.ended() == ({record.job_id for record in records}, set())
    assert len(list(opened.joined_lines())) == 5


def test_a_segment_is_lines_that_people_and_programs_can_read(tmp_path: Path) -> None:
    run, records = make_run(str(tmp_path / "run"))
    *lines, index, last = (tmp_path / "run" / SEGMENTS / "w1-x-0001.seg").read_bytes().splitlines(keepends=True)
    assert [json.loads(line)["custom_id"] for line in lines] == ["a", "b"]
    assert json.loads(index)["index"] == [
        [records[0].job_id, 0, len(lines[0]), 5],
        [records[1].job_id, len(lines[0]), len(lines[1]), 5],
    ]
    assert unsealed(last) is not None
    assert json.loads(last)["fingerprint"] == run.manifest.fingerprint


def test_only_the_end_of_a_segment_is_read_to_know_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_format, "TAIL_BYTES", 300)  # shorter than an index
    run, records = make_run(str(tmp_path / "run"))
    monkeypatch.setattr(LocalFolder, "read", lambda *_: pytest.fail("a whole file was read"))
    assert run.ended()[0] >= {record.job_id for record in records[:3]}


def torn(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flipped(data: bytes) -> bytes:
    return data.replace(b'"custom_id": "a"', b'"custom_id": "x"')


def without_index(data: bytes) -> bytes:
    return data.replace(b'{"index"', b'{"indeX"')


def of_another_run(data: bytes) -> bytes:
    lines = [json.loads(unsealed(line) or b"") for line in data.splitlines(keepends=True)[:2]]
    for line in lines:
        line["response"]["body"]["system_fingerprint"] = "fp_0"
    return ResultSegment((line["id"].removeprefix(LINE_ID), line) for line in lines).encoded("fp_0")


def with_index(data: bytes, index: object, **last: object) -> bytes:
    *lines, _, _ = data.splitlines(keepends=True)
    row = dump_line({"index": index})
    start = sum(map(len, lines))
    values = {"fingerprint": MANIFEST.fingerprint, "index_start": start}
    values |= {"index_sha256": hashlib.sha256(row).hexdigest()} | last
    return b"".join([*lines, row, sealed(json.dumps(values).encode())])


def index_of(data: bytes) -> list[list[Any]]:
    index: list[list[Any]] = json.loads(data.splitlines()[-2])["index"]
    return index


def names_exchanged(data: bytes) -> list[list[Any]]:
    one, other = index_of(data)
    return [[other[0], *one[1:]], [one[0], *other[1:]]]


DAMAGES: dict[Callable[[bytes], bytes], list[str]] = {  # and the jobs that run again
    torn: ["b"],
    flipped: ["a"],
    without_index: [],
    of_another_run: ["a", "b"],
    lambda data: with_index(data, [], index_start=-1): [],
    lambda data: with_index(data, {"x": 1}): [],
    lambda data: with_index(data, [["x", 0]]): [],
    lambda data: with_index(data, [["x", -9, 0.5, 2**70]]): [],
    lambda data: with_index(data, names_exchanged(data)): [],
    lambda data: with_index(data, [["other", *row[1:]] for row in index_of(data)]): [],
    lambda data: b"": ["a", "b"],
    lambda data: bytes(len(data)): ["a", "b"],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_segment_is_named_and_kept_and_only_jobs_without_a_whole_result_run_again(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    made, records = make_run(str(tmp_path / "run"))
    path = f"{SEGMENTS}/w1-x-0001.seg"
    damaged = damage(made.store.read(path) or b"")
    made.store.write(path, damaged)
    names = {record.job_id: record.job.custom_id for record in records}
    opened = Run.open(made.store.uri)
    queue = load_queue(opened, 5)
    assert sorted(names[job_id] for job_id in queue.unfinished()) == DAMAGES[damage]
    [told] = damage_lines(opened)
    assert f"{path}" in told
    assert "pydantic" not in told
    assert "swiftbatch resume" in told
    [(old, problem, kept)] = opened.set_damaged_aside(queue.unfinished())
    assert (old, made.store.read(kept)) == (path, damaged)
    assert "found" in problem
    assert opened.damaged == {}
    again = Run.open(made.store.uri)
    assert load_queue(again, 5).unfinished() == queue.unfinished()
    assert again.set_damaged_aside(queue.unfinished()) == []
    assert [line["custom_id"] for line in again.joined_lines()] == [n for n in NAMES if n not in DAMAGES[damage]]


def test_a_second_whole_result_of_a_job_makes_up_for_a_damaged_one(tmp_path: Path) -> None:
    made, records = make_run(str(tmp_path / "run"))
    made.write_segment("w9-z-0001", segment_of([records[0]]))
    path = f"{SEGMENTS}/w1-x-0001.seg"
    made.store.write(path, flipped(made.store.read(path) or b""))
    opened = Run.open(made.store.uri)
    assert len(list(opened.joined_lines())) == 5, "before a resume has looked at all of them, too"
    assert opened.result(records[0].job_id) is not None
    opened = Run.open(made.store.uri)
    assert load_queue(opened, 5).unfinished() == []
    assert len(list(opened.joined_lines())) == 5


def test_a_strange_name_of_a_segment_is_told_in_one_line_without_commands_to_a_terminal(tmp_path: Path) -> None:
    made, _ = make_run(str(tmp_path / "run"))
    made.store.write(f"{SEGMENTS}/a\n\x1b[31m.seg", b"x")
    opened = Run.open(made.store.uri)
    opened.ended()
    [told] = damage_lines(opened)
    assert told.startswith(f"{SEGMENTS}/a\\n\\x1b[31m.seg in ")


def test_two_segments_of_a_bucket_that_are_copied_at_once_are_both_read(
    s3_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, records = make_run(s3_uri)
    keep, both_are_kept = result_files._Copies._keep, Barrier(2, timeout=60)

    def keep_and_wait(self: result_files._Copies, data: bytes) -> int:
        start = keep(self, data)
        both_are_kept.wait()
        return start

    monkeypatch.setattr(result_files._Copies, "_keep", keep_and_wait)
    results = result_files.ResultFiles(made.store, {}, made.manifest.fingerprint)
    assert len(results.sizes()) == 4
    places = [results.place(records[number].job_id) for number in (0, 2)]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(results.data, places))
    assert found == [sealed(dump_line(line_of(records[number]))[:-1]) for number in (0, 2)]
