"""One file holds all token logs of a worker, and loses none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from swiftbatch.jobs.checkpoints.checkpoint_files import AttemptStart, Timeline
from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.checkpoints.checkpoint_writer import CheckpointWriter
from swiftbatch.jobs.checkpoints.token_log import (
    WORKER_LOGS_FOLDER,
    PackedLog,
    PackedLogs,
    TokenLog,
    WorkerLogs,
    pack,
    unpack,
)
from swiftbatch.jobs.storage.store import Store, StoreError
from tests.jobs.checkpoints.checkpoint_parts import FINGERPRINT, Cache, output_ids, tokens_at
from tests.jobs.storage.slow_store import GatedStore

NUM = 1_000_001  # of an attempt
START = AttemptStart(worker_id="w1", claimed=12.5, numerics="cpu", attempt=1)
TIMELINE = Timeline(started=3.5, seconds=(0.0,), num_tokens=(9,), num_drafts=(1,), num_accepted_tokens=(0,))
JOBS = ["a-01", "b-02", "c-03"]


@pytest.fixture
def store(tmp_path: Path) -> GatedStore:
    store = GatedStore(str(tmp_path))
    store.open_gate()
    return store


@pytest.fixture
def packed(store: Store) -> PackedLogs:
    return PackedLogs(store, FINGERPRINT)


@pytest.fixture
def writer(checkpoints: CheckpointStore, packed: PackedLogs) -> Iterator[CheckpointWriter]:
    writer = CheckpointWriter(checkpoints, 10, lambda *_: None, WorkerLogs(packed, "w1"))
    for job_id in JOBS:
        writer.open(job_id, NUM, "suffix", Cache(), start=START)
    yield writer
    writer.stop()


def put(writer: CheckpointWriter, num_tokens: int, job_ids: list[str] = JOBS, **how: bool) -> None:
    with writer.together():
        for job_id in job_ids:
            writer.put_tokens(job_id, output_ids(num_tokens), **how)
            writer.put_timeline(job_id, TIMELINE)
    assert writer.flush(60)


def entries(packed: PackedLogs) -> list[PackedLog]:
    return [
        packed.entry(job_id, NUM, START, TokenLog(output_ids(5 + number)), TIMELINE if number else None)
        for number, job_id in enumerate(JOBS)
    ]


def test_an_interval_of_a_worker_is_one_write_whatever_number_of_jobs_it_has(
    writer: CheckpointWriter, store: GatedStore, packed: PackedLogs
) -> None:
    for num_tokens in (10, 20, 30):
        put(writer, num_tokens)
    assert len(store.written) == 3
    assert store.list("checkpoints") == ["workers"]
    [name] = store.list(WORKER_LOGS_FOLDER)  # the older ones are deleted
    assert name.startswith("w1-")
    running = packed.read(["w1"])
    assert {job_id: len(attempt.log.token_ids) for job_id, attempt in running.items()} == dict.fromkeys(JOBS, 30)
    assert running["a-01"].record.timeline == TIMELINE
    assert packed.read(["w"]) == {}


def test_a_job_that_leaves_without_a_result_has_its_log_in_its_own_folder(
    writer: CheckpointWriter, store: GatedStore, checkpoints: CheckpointStore, packed: PackedLogs
) -> None:
    put(writer, 10)
    put(writer, 12, ["a-01"], is_alone=True)  # handed back
    writer.close("a-01", has_ended=False)
    writer.close("b-02", has_ended=False)  # cancelled
    writer.close("c-03")
    assert writer.flush(60)
    assert [len(checkpoints.read_log(job_id).token_ids) for job_id in JOBS] == [12, 10, 0]
    assert [record.worker_id for job_id in JOBS[:2] for record in checkpoints.history(job_id)] == ["w1", "w1"]
    assert packed.found(["w1"]).entries[-1].job_id == "c-03"  # it stays until its result exists
    writer.forget(["c-03"])
    assert writer.flush(60)
    assert store.list(WORKER_LOGS_FOLDER) == []


def test_states_of_a_job_say_who_wrote_them_though_its_log_is_packed(
    writer: CheckpointWriter, checkpoints: CheckpointStore
) -> None:
    put(writer, 10)
    writer.put_state("a-01", tokens_at(0, 12), {})
    assert writer.flush(60)
    assert checkpoints.numerics("a-01", NUM) == "cpu"
    assert writer.close("a-01")
    assert not writer.close("b-02")  # it has no file of its own


def test_what_is_whole_of_a_torn_file_is_found(packed: PackedLogs) -> None:
    whole = entries(packed)
    data = pack(whole)
    sizes = [len(pack(whole[: number + 1])) for number in range(3)]
    for size in range(len(data) + 1):
        found, num_lost = unpack(data[:size])
        num_whole = sum(end <= size for end in sizes)
        assert found == whole[:num_whole]
        assert num_lost == size - ([0, *sizes][num_whole])


def test_bytes_that_were_lost_within_an_entry_hide_no_other(packed: PackedLogs) -> None:
    whole = entries(packed)
    data, second = pack(whole), len(pack(whole[:1]))
    for start in range(0, second - 5, 3):
        found, _ = unpack(data[:start] + data[start + 5 :])
        assert found[-2:] == whole[1:]


def test_a_damaged_entry_is_named_and_the_others_are_found(
    store: Store, packed: PackedLogs, checkpoints: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    data = pack(entries(packed))
    second = len(pack(entries(packed)[:1]))
    for place in (second + 5, data.index(b"SWTOKENS", second) + 60):  # damage in its line, and in its log
        store.write(f"{WORKER_LOGS_FOLDER}/w1-x-1.logs", data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        packed.put_in_place(packed.found())
        assert [len(checkpoints.read_log(job_id).token_ids) for job_id in JOBS] == [5, 0, 7]
        assert store.list(WORKER_LOGS_FOLDER) == []
        for job_id in JOBS:
            checkpoints.clear(job_id)
    assert "that are no whole entry" in caplog.text
    assert "skipped checkpoints/workers, b-02, attempt 1000001" in caplog.text


def test_a_file_of_another_run_gives_nothing(store: Store, checkpoints: CheckpointStore) -> None:
    other = PackedLogs(store, "fp_of_another")
    other.write("w1-x-1.logs", entries(other))
    packed = PackedLogs(store, FINGERPRINT)
    assert packed.read() == {}
    packed.put_in_place(packed.found())
    assert all(checkpoints.attempts(job_id) == [] for job_id in JOBS)


def test_logs_are_put_in_place_once_and_whole_wherever_that_was_broken_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_done, num_steps, write, delete = 0, 0, Store.write, Store.delete

    def step() -> None:
        nonlocal num_steps
        num_steps -= 1
        if num_steps < 0:
            raise StoreError("killed")

    for last in range(1, 20):
        store = Store(str(tmp_path / f"{last}"))
        packed, checkpoints = PackedLogs(store, FINGERPRINT), CheckpointStore(store, FINGERPRINT)
        packed.write("w1-x-000001.logs", entries(packed))
        packed.write("w1-x-000002.logs", [packed.entry(JOBS[0], NUM, START, TokenLog(output_ids(8)), TIMELINE)])
        # written when the job was returned, after the packed file
        checkpoints.write_tokens(JOBS[2], NUM, output_ids(20))
        num_steps = last
        with monkeypatch.context() as patch:
            patch.setattr(Store, "write", lambda self, path, data: (step(), write(self, path, data)))
            patch.setattr(Store, "delete", lambda self, path: (step(), delete(self, path)))
            try:
                packed.put_in_place(packed.found())
                num_done += 1
            except StoreError:
                pass
        assert num_done or store.list(WORKER_LOGS_FOLDER)
        packed.put_in_place(packed.found())
        assert [len(checkpoints.read_log(job_id).token_ids) for job_id in JOBS] == [8, 6, 20]
        assert store.list(WORKER_LOGS_FOLDER) == []
        assert checkpoints.history(JOBS[0])[0].timeline == TIMELINE
    assert num_done


def test_of_a_job_with_a_result_nothing_is_put_in_place(store: Store, packed: PackedLogs) -> None:
    packed.write("w1-x-1.logs", entries(packed))
    packed.put_in_place(packed.found().without(["a-01", "c-03"]))
    assert store.list("checkpoints") == ["b-02", "workers"]
    assert store.list(WORKER_LOGS_FOLDER) == []
