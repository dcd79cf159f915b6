from __future__ import annotations

import numpy as np
import pytest

from swiftbatch.jobs.checkpoints.checkpoint_files import ResumeRecord
from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.checkpoints.checkpoint_writer import CheckpointWriter
from swiftbatch.jobs.storage.store import Store
from tests.jobs.checkpoints.checkpoint_parts import (
    FINGERPRINT,
    JOB,
    Cache,
    check_checkpoints,
    claim,
    output_ids,
    tokens_at,
)


def test_a_job_goes_on_from_its_checkpoints_on_an_object_store(s3_uri: str, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(s3_uri)
    checkpoints = CheckpointStore(store, FINGERPRINT)
    writer = CheckpointWriter(checkpoints, 16, lambda *_: None)
    record = ResumeRecord(
        kind="kv", num_recovered_tokens=9, num_recomputed_tokens=0, num_loaded_positions=9, seconds=0.5, resumed=3e9
    )
    for end in (30, 70):
        attempt = claim(checkpoints, JOB, "w", "cpu")
        manifests = checkpoints.read_manifests(JOB)
        if manifests:
            checkpoints.write_resume(JOB, attempt, record)
        writer.open(JOB, attempt, "suffix", Cache(), manifests[0].segments if manifests else ())
        for num_positions in (end - 10, end):
            writer.put_tokens(JOB, output_ids(num_positions - 4))
            writer.put_state(JOB, tokens_at(0, num_positions), {"table": np.arange(num_positions)})
            assert writer.flush(60)
        writer.close(JOB)
    writer.stop()
    newest, older = checkpoints.read_manifests(JOB)
    assert newest.segments[: len(older.segments)] == older.segments
    assert [record.resume is not None for record in checkpoints.history(JOB)] == [False, True]
    assert [name for name in store.list(f"checkpoints/{JOB}/0002") if name[0] == "d"] == ["drafter-70.arrow"]
    assert check_checkpoints(checkpoints) == (66, 70)
    checkpoints.clear(JOB)
    assert store.list("checkpoints") == []
    assert caplog.records == []
