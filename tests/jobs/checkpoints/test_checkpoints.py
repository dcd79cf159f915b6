"""Checkpoints keep attempts apart and never give a wrong token."""

from __future__ import annotations

import json
import logging
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftbatch.jobs.checkpoints.checkpoint_files import AttemptRecord, ResumeRecord, StateManifest
from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.checkpoints.token_log import TokenIds, TokenLog, encode_log
from swiftbatch.jobs.storage.store import Store
from tests.jobs.checkpoints.checkpoint_parts import FINGERPRINT, IDENTITY, claim

JOB = "job-0123456789abcdef"

TOKEN_IDS = st.lists(st.integers(0, 2**32 - 1), max_size=40).map(lambda ids: np.array(ids, dtype=np.uint32))


def tokens(*token_ids: int) -> TokenIds:
    return np.array(token_ids, dtype=np.uint32)


def path_of(attempt: int, name: str) -> str:
    return f"checkpoints/{JOB}/{attempt:04d}/{name}"


def test_attempts_are_found_by_their_numbers_and_say_who_makes_them(store: Store, checkpoints: CheckpointStore) -> None:
    assert checkpoints.attempts(JOB) == []
    assert [claim(checkpoints, JOB, f"worker {number}") for number in range(3)] == [1, 2, 3]
    assert checkpoints.attempts(JOB) == [1, 2, 3]
    assert checkpoints.attempts("other") == []
    start = json.loads(store.read(path_of(2, "claim.json")) or b"")
    assert start["worker_id"] == "worker 1"


def test_tokens_are_replaced_as_a_whole_and_the_longest_log_counts(checkpoints: CheckpointStore) -> None:
    assert checkpoints.read_log(JOB).token_ids.tolist() == []
    claim(checkpoints, JOB, "a")
    checkpoints.write_tokens(JOB, 1, tokens(5))
    assert checkpoints.write_tokens(JOB, 1, tokens(5, 6, 7)) == 16 + len(IDENTITY.pack()) + 4 + 12
    claim(checkpoints, JOB, "b")
    assert checkpoints.read_log(JOB).token_ids.tolist() == [5, 6, 7]
    checkpoints.write_tokens(JOB, 2, tokens(5, 6))
    assert checkpoints.read_log(JOB).token_ids.tolist() == [5, 6, 7]
    checkpoints.write_tokens(JOB, 2, tokens(5, 6, 7, 2**32 - 1))
    found = checkpoints.read_log(JOB).token_ids
    assert found.tolist() == [5, 6, 7, 2**32 - 1]
    assert found.dtype == np.uint32
    assert found.flags.writeable


def test_a_torn_token_log_is_named_and_skipped(
    store: Store, checkpoints: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints.write_tokens(JOB, 1, tokens(5, 6))
    checkpoints.write_tokens(JOB, 2, tokens(5, 6, 7, 8))
    whole = store.read(path_of(2, "tokens.bin")) or b""
    store.write(path_of(2, "tokens.bin"), whole[:-2])
    assert checkpoints.read_log(JOB).token_ids.tolist() == [5, 6]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert path_of(2, "tokens.bin") in record.getMessage()
    assert "that do not match their checksum" in record.getMessage()
    assert "\n" not in record.getMessage()


@settings(max_examples=100)
@given(token_ids=TOKEN_IDS, older=TOKEN_IDS, data=st.data())
def test_a_damaged_token_log_never_gives_wrong_tokens(
    store: Store, caplog: pytest.LogCaptureFixture, token_ids: TokenIds, older: TokenIds, data: st.DataObject
) -> None:
    caplog.clear()
    checkpoints = CheckpointStore(store, FINGERPRINT)
    checkpoints.write_tokens(JOB, 1, older)
    damaged = bytearray(encode_log(TokenLog(token_ids), IDENTITY))
    position = data.draw(st.integers(0, len(damaged) - 1))
    if data.draw(st.booleans()):
        damaged[position] ^= data.draw(st.integers(1, 255))
    else:
        del damaged[position:]
    store.write(path_of(2, "tokens.bin"), bytes(damaged))
    assert np.array_equal(checkpoints.read_log(JOB).token_ids, older)
    assert path_of(2, "tokens.bin") in caplog.text


def test_clear_removes_all_of_one_job_and_nothing_of_another(store: Store, checkpoints: CheckpointStore) -> None:
    for job_id in (JOB, "other"):
        claim(checkpoints, job_id, "a")
        checkpoints.write_tokens(job_id, 1, tokens(5))
        checkpoints.write_manifest(job_id, 1, StateManifest())
    checkpoints.clear(JOB)
    checkpoints.clear(JOB)
    assert store.list("checkpoints") == ["other"]
    assert checkpoints.attempts(JOB) == []
    assert checkpoints.read_log("other").token_ids.tolist() == [5]
    assert checkpoints.read_manifests("other") == [StateManifest()]


RESUME = ResumeRecord(
    kind="kv", num_recovered_tokens=90, num_recomputed_tokens=10, num_loaded_positions=64, seconds=0.25, resumed=3e9
)


def test_the_history_tells_who_had_the_job_when_and_how_each_attempt_began(checkpoints: CheckpointStore) -> None:
    assert checkpoints.history(JOB) == []
    before = time.time()
    claim(checkpoints, JOB, "w0", "cpu avx512")
    claim(checkpoints, JOB, "w1")
    checkpoints.write_resume(JOB, 2, RESUME)
    first, second = checkpoints.history(JOB)
    assert (first.attempt, first.worker_id, first.numerics, first.resume) == (1, "w0", "cpu avx512", None)
    assert (second.attempt, second.worker_id, second.numerics, second.resume) == (2, "w1", "", RESUME)
    assert before <= first.claimed <= second.claimed <= time.time()
    assert set(second.model_dump()["resume"]) == set(RESUME.model_dump())


def test_what_is_damaged_in_a_history_is_named_and_the_rest_is_told(
    store: Store, checkpoints: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(1, 5):
        claim(checkpoints, JOB, f"w{number}")
        checkpoints.write_resume(JOB, number, RESUME)
    store.delete(path_of(1, "claim.json"))
    store.write(path_of(2, "claim.json"), (store.read(path_of(2, "claim.json")) or b"").replace(b"w2", b"w3"))
    store.delete(path_of(2, "resume.json"))
    store.write(path_of(3, "resume.json"), b'{"kind": "kv"}')
    found = checkpoints.history(JOB)
    assert found[:2] == [AttemptRecord(attempt=1, resume=RESUME, number=1), AttemptRecord(attempt=2, number=2)]
    assert [(record.worker_id, record.resume) for record in found[2:]] == [("w3", None), ("w4", RESUME)]
    damaged = [path_of(1, "claim.json"), path_of(2, "claim.json"), path_of(2, "resume.json"), path_of(3, "resume.json")]
    for record, path in zip(caplog.records, damaged, strict=True):
        assert path in record.getMessage()


def test_what_a_dead_attempt_never_wrote_is_named_once(
    store: Store, checkpoints: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    claim(checkpoints, JOB, "w1")
    checkpoints.write_tokens(JOB, 2, tokens(5))
    store.write(path_of(3, "kv-0-8.arrow"), b"segment before its manifest")
    claim(checkpoints, JOB, "w4")
    for _ in range(2):
        assert checkpoints.read_log(JOB).token_ids.tolist() == [5]
        assert checkpoints.read_manifests(JOB) == []
        assert [record.worker_id for record in checkpoints.history(JOB)] == ["w1", "", "", "w4"]
    absent = [
        path_of(3, "tokens.bin"),  # the first attempt wrote nothing that precedes a log
        path_of(3, "manifest.json"),
        path_of(2, "claim.json"),
        path_of(2, "resume.json"),
        path_of(3, "claim.json"),
        path_of(3, "resume.json"),
    ]
    for record, path in zip(caplog.records, absent, strict=True):
        assert f"{path} in {store.shown_uri}: found no file" in record.getMessage()
