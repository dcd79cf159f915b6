"""Files of another job or run are reported and skipped."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from swiftbatch.jobs.checkpoints.checkpoint_files import ResumeRecord, Timeline
from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.checkpoints.kept_logs import KeptLogs
from swiftbatch.jobs.checkpoints.logprob_files import WrittenSpans
from swiftbatch.jobs.checkpoints.token_log import Rewind, TokenLog
from swiftbatch.jobs.file_owner import DamagedFileError, Identity
from swiftbatch.jobs.logprobs import TokenLogprobs
from swiftbatch.jobs.storage.store import Store
from tests.jobs.checkpoints.checkpoint_parts import (
    FINGERPRINT,
    IDENTITY,
    JOB,
    check_checkpoints,
    claim,
    output_ids,
    segment_of,
    write_state,
)

OTHER_JOB = "job-fedcba9876543210"
OTHER_RUN = "fp_fedcba9876543210"
RESUME = ResumeRecord(
    kind="kv",
    num_recovered_tokens=4,
    num_recomputed_tokens=1,
    num_loaded_positions=8,
    seconds=1.5,
    resumed=12.5,
)

TIMELINE = Timeline(started=3.5, seconds=(0.0,), num_tokens=(9,), num_drafts=(1,), num_accepted_tokens=(0,))
FILES = (
    *("claim.json", "tokens.bin", "logprobs-0-9-1.bin", "kv-0-5.arrow", "kv-5-8.arrow", "drafter-8.arrow"),
    *("manifest.json", "resume.json", "timeline.json"),
)
STRANGERS = [Identity(job_id=OTHER_JOB, fingerprint=FINGERPRINT), Identity(job_id=JOB, fingerprint=OTHER_RUN)]


def logprobs_of(num_tokens: int) -> TokenLogprobs:
    top = np.arange(num_tokens, dtype=np.int32).reshape(-1, 1)
    return TokenLogprobs.of(top[:, 0].astype(np.float32) / -4, top, top.astype(np.float32) / -8)


def write_attempt(store: Store, identity: Identity, attempt: int, num_tokens: int) -> None:
    """Write all files of an attempt."""
    checkpoints = CheckpointStore(store, identity.fingerprint)
    job_id = identity.job_id
    assert claim(checkpoints, job_id, f"worker {attempt}", "cpu") == attempt
    log = TokenLog(output_ids(num_tokens), (Rewind(12, 3),))
    checkpoints.write_with_logprobs(job_id, attempt, log, logprobs_of(num_tokens), WrittenSpans())
    checkpoints.write_resume(job_id, attempt, RESUME)
    checkpoints.write_timeline(job_id, attempt, TIMELINE)
    write_state(checkpoints, attempt, [5, 8], job_id=job_id)


def put_stranger_s(store: Store, identity: Identity, name: str, elsewhere: Store) -> None:
    write_attempt(elsewhere, identity, 1, 9)
    data = elsewhere.read(f"checkpoints/{identity.job_id}/0001/{name}")
    store.write(f"checkpoints/{JOB}/0002/{name}", data)


@pytest.mark.parametrize("stranger", STRANGERS, ids=["another job", "another run"])
@pytest.mark.parametrize("name", FILES)
def test_a_stranger_s_file_is_named_and_what_is_left_is_used(
    store: Store,
    name: str,
    stranger: Identity,
    tmp_path_factory: pytest.TempPathFactory,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write_attempt(store, IDENTITY, 1, 5)
    write_attempt(store, IDENTITY, 2, 9)
    put_stranger_s(store, stranger, name, Store(str(tmp_path_factory.mktemp("stranger"))))
    checkpoints = CheckpointStore(store, FINGERPRINT)

    num_tokens, num_positions = check_checkpoints(checkpoints)
    log, logprobs = checkpoints.read_log_with_logprobs(JOB, 1)
    first, second = checkpoints.history(JOB)

    assert num_tokens == (5 if name == "tokens.bin" else 9)
    assert len(log.token_ids) == len(logprobs) == (5 if name in ("tokens.bin", "logprobs-0-9-1.bin") else 9)
    assert num_positions == 8  # the first attempt also has all segments
    assert (first.worker_id, first.timeline) == ("worker 1", TIMELINE)
    assert second.worker_id == ("" if name == "claim.json" else "worker 2")
    assert second.resume == (None if name == "resume.json" else RESUME)
    assert second.timeline == (None if name == "timeline.json" else TIMELINE)
    (message,) = {record.getMessage() for record in caplog.records}
    assert f"skipped checkpoints/{JOB}/0002/{name} in {store.shown_uri}: found a file of " in message
    assert message.endswith("; the job goes on from what is left")
    if stranger.job_id == OTHER_JOB:
        assert f"of job {OTHER_JOB}, expected one of job {JOB};" in message
    else:
        assert "of a run with another model, dtype, tokenizer, chat template, " in message
        assert f"{OTHER_RUN}, expected {FINGERPRINT};" in message


def test_a_folder_of_another_job_leaves_nothing_but_a_name_each(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    write_attempt(store, STRANGERS[0], 1, 9)
    for name in FILES:
        store.write(f"checkpoints/{JOB}/0001/{name}", store.read(f"checkpoints/{OTHER_JOB}/0001/{name}") or b"")
    checkpoints = CheckpointStore(store, FINGERPRINT)
    assert checkpoints.read_log(JOB).token_ids.tolist() == []
    assert checkpoints.read_manifests(JOB) == []
    assert claim(checkpoints, JOB, "next") == 2
    assert len(caplog.records) == len({record.getMessage() for record in caplog.records}) == 2
    assert check_checkpoints(CheckpointStore(store, FINGERPRINT)) == (0, 0)


def test_a_segment_that_is_damaged_and_the_job_s_own_is_not_taken_for_a_stranger_s(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = CheckpointStore(store, FINGERPRINT)
    entry = checkpoints.write_segment(JOB, 1, segment_of(0, 5))
    path = f"checkpoints/{JOB}/{entry.file}"
    whole = store.read(path) or b""
    store.write(path, whole[:-1] + bytes([whole[-1] ^ 1]))
    assert checkpoints.read_segment(JOB, entry) is None
    assert "found content that does not match its checksum" in caplog.text


@pytest.mark.parametrize(("file", "read"), [(".bin", KeptLogs.read), (".logprobs", None)])
@pytest.mark.parametrize("stranger", STRANGERS, ids=["another job", "another run"])
def test_a_kept_log_of_another_job_is_refused_by_name(
    store: Store, file: str, read: Callable[[KeptLogs, str], TokenLog] | None, stranger: Identity
) -> None:
    log = TokenLog(output_ids(5))
    KeptLogs(store, FINGERPRINT).write(JOB, log, logprobs_of(5))
    KeptLogs(store, stranger.fingerprint).write(OTHER_JOB, log, logprobs_of(5))
    if stranger.job_id == JOB:
        KeptLogs(store, OTHER_RUN).write(JOB, log, logprobs_of(5))
    else:
        store.write(f"tokens/{JOB}{file}", store.read(f"tokens/{OTHER_JOB}{file}") or b"")
    kept = KeptLogs(store, FINGERPRINT)
    found = OTHER_JOB if stranger.job_id == OTHER_JOB else OTHER_RUN
    with pytest.raises(DamagedFileError, match=f"found a file of .*{re.escape(found)}"):
        kept.read_logprobs(JOB, log) if read is None else read(kept, JOB)
