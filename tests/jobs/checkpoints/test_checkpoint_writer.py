"""The background writer writes the newest data, logs first, and never blocks the engine."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.checkpoints.checkpoint_writer import CheckpointWriter
from swiftbatch.jobs.storage.store import StoreError
from tests.jobs.checkpoints.checkpoint_parts import (
    JOB,
    Cache,
    check_checkpoints,
    kv_at,
    output_ids,
    tokens_at,
    write_state,
)
from tests.jobs.storage.slow_store import GatedStore

SEGMENT = 10


@pytest.fixture
def store(tmp_path: Path) -> GatedStore:
    return GatedStore(str(tmp_path))


@pytest.fixture
def told() -> list[tuple[str, int, float]]:
    return []


@pytest.fixture
def writer(
    store: GatedStore, checkpoints: CheckpointStore, told: list[tuple[str, int, float]]
) -> Iterator[CheckpointWriter]:
    writer = CheckpointWriter(checkpoints, SEGMENT, lambda *what: told.append(what))
    yield writer
    store.open_gate()
    writer.stop()


def table(num_positions: int) -> dict[str, NDArray[Any]]:
    return {"table": np.arange(num_positions)}


def put(writer: CheckpointWriter, num_positions: int, job_id: str = JOB) -> None:
    """Queue log and state of a cache of `num_positions`, four of them the prompt's."""
    writer.put_tokens(job_id, output_ids(num_positions - 4))
    writer.put_state(job_id, tokens_at(0, num_positions), table(num_positions))


def test_all_that_was_put_is_written_and_told(
    store: GatedStore, checkpoints: CheckpointStore, writer: CheckpointWriter, told: list[tuple[str, int, float]]
) -> None:
    store.open_gate()
    writer.open(JOB, 1, "suffix", Cache())
    for num_positions in (7, 28, 33):
        put(writer, num_positions)
        assert writer.flush(60)
    (manifest,) = checkpoints.read_manifests(JOB)
    assert [entry.end for entry in manifest.segments] == [7, 17, 27, 28, 33]
    assert (manifest.drafter.num_positions, manifest.drafter.engine) == (33, "suffix")
    assert check_checkpoints(checkpoints) == (29, 33)
    assert [name for name in store.list(f"checkpoints/{JOB}/0001") if name[:2] == "dr"] == ["drafter-33.arrow"]
    assert [kind for kind, *_ in told].count("tokens") == 3
    assert len(told) == len(store.written)
    assert all(num_bytes > 0 and seconds > 0 for _, num_bytes, seconds in told)


def test_each_segment_has_its_manifest_before_the_next_and_the_last_one_shares_it_with_the_drafter(
    store: GatedStore, writer: CheckpointWriter
) -> None:
    writer.open(JOB, 1, "suffix", Cache())
    put(writer, 14)
    store.open_gate()
    assert writer.flush(60)
    names = ["tokens.bin", "kv-0-10.arrow", "manifest.json", "kv-10-14.arrow", "drafter-14.arrow", "manifest.json"]
    assert store.written == [f"{JOB}/0001/{name}" for name in names]


def test_token_logs_of_all_jobs_go_before_any_state_and_states_take_turns(
    store: GatedStore, writer: CheckpointWriter
) -> None:
    for job_id in "abc":
        writer.open(job_id, 1, "suffix", Cache())
    put(writer, 25, "a")
    store.let_through(2)
    assert store.is_waiting.wait(60)
    while len(store.written) < 2:
        time.sleep(0.001)
    writer.put_state("b", tokens_at(0, 15), table(15))
    put(writer, 15, "c")
    writer.put_tokens("a", output_ids(30))
    store.open_gate()
    assert writer.flush(60)
    begun = ["a/0001/tokens.bin", "a/0001/kv-0-10.arrow", "a/0001/manifest.json"]
    assert store.written[:3] == begun
    assert store.written[3:5] == ["c/0001/tokens.bin", "a/0001/tokens.bin"]
    rest = store.written[5:]
    assert all(not path.endswith("tokens.bin") for path in rest)
    # no job has two turns in a row while all have pending files
    assert all(first[0] != second[0] for first, second in pairwise(rest[:12]))


def test_a_log_that_is_put_again_and_again_does_not_hold_up_the_others(
    store: GatedStore, writer: CheckpointWriter
) -> None:
    for job_id in "ab":
        writer.open(job_id, 1, "suffix")
    writer.put_tokens("a", output_ids(1))
    assert store.is_waiting.wait(60)
    writer.put_tokens("b", output_ids(1))
    writer.put_tokens("a", output_ids(2))
    store.open_gate()
    assert writer.flush(60)
    assert store.written == ["a/0001/tokens.bin", "b/0001/tokens.bin", "a/0001/tokens.bin"]


def test_behind_a_slow_store_the_newest_replaces_what_waits(
    store: GatedStore, checkpoints: CheckpointStore, writer: CheckpointWriter
) -> None:
    writer.open(JOB, 1, "suffix", Cache())
    writer.put_tokens(JOB, output_ids(1))
    assert store.is_waiting.wait(60)
    states = []
    for num_positions in range(5, 100):
        put(writer, num_positions)
        states.append(weakref.ref(drafter_array := np.zeros(100)))
        writer.put_state(JOB, tokens_at(0, num_positions), {"table": drafter_array})
        del drafter_array
    gc.collect()
    assert sum(state() is not None for state in states) == 1
    put(writer, 103)
    assert writer.num_state_positions(JOB) == 103
    store.open_gate()
    assert writer.flush(60)
    assert store.written.count(f"{JOB}/0001/tokens.bin") == 2
    assert [path for path in store.written if "drafter" in path] == [f"{JOB}/0001/drafter-103.arrow"]
    assert len([path for path in store.written if "kv-" in path]) == 11
    assert check_checkpoints(checkpoints) == (99, 103)


def test_a_newer_state_goes_on_where_the_segments_of_a_half_written_one_are(
    store: GatedStore, checkpoints: CheckpointStore, writer: CheckpointWriter
) -> None:
    writer.open(JOB, 1, "suffix", Cache())
    put(writer, 35)
    store.let_through(2)
    while len(store.written) < 2:
        time.sleep(0.001)
    put(writer, 44)
    store.open_gate()
    assert writer.flush(60)
    assert [path.rsplit("/")[-1] for path in store.written if "kv-" in path] == [
        f"kv-{start}-{min(start + 10, 44)}.arrow" for start in (0, 10, 20, 30, 40)
    ]
    assert check_checkpoints(checkpoints) == (40, 44)


def test_however_much_waits_one_encoded_segment_is_in_memory(store: GatedStore, checkpoints: CheckpointStore) -> None:
    class BigCache:
        def kv(self, start: int, end: int) -> NDArray[Any]:
            return np.zeros((8, 4000, 32), np.uint16)[:, start:end]

    writer = CheckpointWriter(checkpoints, 1000, lambda *_: None)
    before = pa.total_allocated_bytes()
    for job_id in "abcdef":
        writer.open(job_id, 1, "suffix", BigCache())
        writer.put_state(job_id, np.zeros(4000, np.int64), {})
    most = 0
    for _ in range(20):
        assert store.is_waiting.wait(60)
        most = max(most, pa.total_allocated_bytes() - before)
        store.let_through(1)
    assert 8 * 1000 * 32 * 2 < most < 1.1 * 8 * 1000 * 32 * 2
    store.open_gate()
    writer.stop()


def test_nothing_of_a_closed_job_is_written_and_close_waits_for_the_file_under_way(
    store: GatedStore, checkpoints: CheckpointStore, writer: CheckpointWriter
) -> None:
    for job_id in (JOB, "other"):
        writer.open(job_id, 1, "suffix", Cache())
        put(writer, 25, job_id)
    assert store.is_waiting.wait(60)
    closing = threading.Thread(target=writer.close, args=(JOB,))
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    store.let_through(1)
    closing.join(60)
    assert not closing.is_alive()
    assert store.written == [f"{JOB}/0001/tokens.bin"]
    checkpoints.clear(JOB)
    store.open_gate()
    assert writer.flush(60)
    assert store.list("checkpoints") == ["other"]
    writer.close(JOB)
    with pytest.raises(ValueError, match=f"job {JOB} is not open"):
        writer.put_tokens(JOB, output_ids(1))


def test_a_closed_job_can_be_opened_again_under_its_next_attempt(
    store: GatedStore, checkpoints: CheckpointStore, writer: CheckpointWriter
) -> None:
    store.open_gate()
    writer.open(JOB, 1, "suffix", Cache())
    with pytest.raises(ValueError, match="is open already"):
        writer.open(JOB, 2, "suffix", Cache())
    put(writer, 25)
    assert writer.flush(60)
    writer.close(JOB)
    (manifest,) = checkpoints.read_manifests(JOB)
    writer.open(JOB, 2, "token-recycling", Cache(), manifest.segments)
    assert writer.num_state_positions(JOB) == 25
    put(writer, 31)
    assert writer.flush(60)
    newest, _ = checkpoints.read_manifests(JOB)
    assert newest.segments[:3] == manifest.segments
    assert [entry.file for entry in newest.segments[3:]] == ["0002/kv-25-31.arrow"]
    assert newest.drafter.engine == "token-recycling"
    assert check_checkpoints(checkpoints) == (27, 31)


def test_a_cache_that_is_behind_the_job_s_segments_writes_nothing(
    store: GatedStore, checkpoints: CheckpointStore, writer: CheckpointWriter
) -> None:
    store.open_gate()
    segments = write_state(checkpoints, 1, [10, 20]).segments
    num_written = len(store.written)
    writer.open(JOB, 2, "suffix", Cache(), segments)
    writer.put_state(JOB, tokens_at(0, 12), table(12))
    assert writer.num_state_positions(JOB) == 20
    assert writer.flush(60)
    assert len(store.written) == num_written


def test_without_a_drafter_state_the_older_one_stays(
    store: GatedStore, checkpoints: CheckpointStore, writer: CheckpointWriter
) -> None:
    store.open_gate()
    writer.open(JOB, 1, "suffix", Cache())
    for num_positions, state in ((10, table(10)), (20, {})):
        writer.put_state(JOB, tokens_at(0, num_positions), state)
        assert writer.flush(60)
    (manifest,) = checkpoints.read_manifests(JOB)
    assert manifest.num_positions == 20
    assert manifest.drafter.num_positions == 10


def test_a_job_without_a_source_has_a_token_log_only(
    store: GatedStore, checkpoints: CheckpointStore, writer: CheckpointWriter
) -> None:
    store.open_gate()
    writer.open(JOB, 1, "suffix")
    with pytest.raises(ValueError, match="opened without a source of KV"):
        writer.put_state(JOB, tokens_at(0, 5), {})
    writer.put_tokens(JOB, output_ids(5))
    assert writer.flush(60)
    assert store.list(f"checkpoints/{JOB}/0001") == ["tokens.bin"]


def test_what_is_put_may_be_changed_at_once(
    store: GatedStore, checkpoints: CheckpointStore, writer: CheckpointWriter
) -> None:
    writer.open(JOB, 1, "suffix", Cache())
    log, token_ids = output_ids(9), tokens_at(0, 13).astype(np.int64)
    writer.put_tokens(JOB, log)
    writer.put_state(JOB, token_ids, {})
    log[:], token_ids[:] = 0, 0
    store.open_gate()
    assert writer.flush(60)
    assert check_checkpoints(checkpoints) == (9, 13)


def test_flush_gives_up_when_its_time_is_over(store: GatedStore, writer: CheckpointWriter) -> None:
    writer.open(JOB, 1, "suffix", Cache())
    assert writer.flush(0)
    put(writer, 25)
    assert not writer.flush(0.2)
    store.open_gate()
    assert writer.flush(60)


def test_a_failure_for_good_is_told_by_check_and_nothing_waits_for_the_thread(
    store: GatedStore, writer: CheckpointWriter
) -> None:
    writer.open(JOB, 1, "suffix", Cache())
    put(writer, 25)
    assert store.is_waiting.wait(60)
    writer.check()
    store.failing = True
    store.open_gate()
    assert not writer.flush(60)
    for _ in range(2):
        with pytest.raises(StoreError, match="No space left on device"):
            writer.check()
    store.failing = False
    put(writer, 26)
    assert not writer.flush(60)
    writer.close(JOB)
    assert store.written == []
    with pytest.raises(StoreError):
        writer.check()


def test_an_error_of_any_kind_in_the_thread_is_told(store: GatedStore, writer: CheckpointWriter) -> None:
    class BrokenCache:
        def kv(self, start: int, end: int) -> NDArray[Any]:
            return kv_at(start, end).astype(np.float64)

    store.open_gate()
    writer.open(JOB, 1, "suffix", BrokenCache())
    put(writer, 25)
    assert not writer.flush(60)
    with pytest.raises(TypeError, match="found KV of float64"):
        writer.check()


def test_stop_ends_the_thread_after_the_file_under_way(store: GatedStore, checkpoints: CheckpointStore) -> None:
    writer = CheckpointWriter(checkpoints, SEGMENT, lambda *_: None)
    writer.open(JOB, 1, "suffix", Cache())
    put(writer, 25)
    assert store.is_waiting.wait(60)
    stopping = threading.Thread(target=writer.stop)
    stopping.start()
    stopping.join(0.1)
    store.open_gate()
    stopping.join(60)
    assert store.written == [f"{JOB}/0001/tokens.bin"]
    assert not writer.flush(60)


def test_puts_and_closes_at_any_time_leave_checkpoints_that_agree(
    store: GatedStore, checkpoints: CheckpointStore, writer: CheckpointWriter
) -> None:
    store.open_gate()
    generator = np.random.default_rng(0)
    num_positions = 4
    for attempt in range(1, 13):
        manifests = checkpoints.read_manifests(JOB)
        writer.open(JOB, attempt, "suffix", Cache(), manifests[0].segments if manifests else ())
        for _ in range(generator.integers(1, 30)):
            num_positions += int(generator.integers(1, 12))
            put(writer, num_positions)
            time.sleep(generator.exponential(0.002))
        writer.flush(generator.exponential(0.01) if attempt < 12 else 60)
        writer.close(JOB)
        num_files = len(store.written)
        num_tokens, num_found = check_checkpoints(checkpoints)
        assert num_tokens <= num_positions - 4
        assert num_found <= num_positions
        assert len(store.written) == num_files
    assert (num_tokens, num_found) == (num_positions - 4, num_positions)
    writer.check()
