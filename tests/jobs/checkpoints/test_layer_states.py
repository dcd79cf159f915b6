"""Layer states in manifests: replaced by newer ones, dropped by rewinds."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from swiftbatch.jobs.checkpoints.checkpoint_files import StateManifest
from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.checkpoints.checkpoint_writer import CheckpointWriter
from swiftbatch.jobs.checkpoints.kept_logs import inherit
from swiftbatch.jobs.checkpoints.kv_segments import LayerStates
from swiftbatch.jobs.checkpoints.token_log import Rewind, TokenLog
from swiftbatch.jobs.file_owner import Identity
from swiftbatch.jobs.storage.store import Store
from tests.jobs.checkpoints.checkpoint_parts import FINGERPRINT, JOB, Cache, claim, output_ids, tokens_at

FOLDER = f"checkpoints/{JOB}/0001"


@pytest.fixture
def writer(checkpoints: CheckpointStore) -> Iterator[CheckpointWriter]:
    writer = CheckpointWriter(checkpoints, 10, lambda *_: None)
    claim(checkpoints, JOB, "w")
    writer.open(JOB, 1, "suffix", Cache())
    yield writer
    writer.stop()


def states_at(num_positions: int) -> LayerStates:
    return LayerStates(num_positions, {"state.0": np.full((2, 3, 4), num_positions, dtype=np.float32)})


def put(writer: CheckpointWriter, num_positions: int, layers: LayerStates | None = None) -> None:
    writer.put_state(JOB, tokens_at(0, num_positions), {}, layers)
    assert writer.flush(60)


def named(checkpoints: CheckpointStore, job_id: str = JOB) -> LayerStates | None:
    [manifest] = checkpoints.read_manifests(job_id)
    return None if manifest.states is None else checkpoints.read_states(job_id, manifest.states)


def test_newer_states_take_the_place_of_older_ones(
    store: Store, checkpoints: CheckpointStore, writer: CheckpointWriter
) -> None:
    for num_positions in (8, 16):
        put(writer, num_positions + 3, states_at(num_positions))
    put(writer, 30)
    found = named(checkpoints)
    assert (found.num_positions, found.arrays["state.0"].tolist()) == (16, states_at(16).arrays["state.0"].tolist())
    assert [name for name in store.list(FOLDER) if name.startswith("states")] == ["states-16.arrow"]
    assert writer.num_positions_of_states(JOB) == 16


def test_states_are_named_behind_the_segments_that_reach_them(
    checkpoints: CheckpointStore, writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests: list[StateManifest] = []
    monkeypatch.setattr(checkpoints, "write_manifest", lambda *given: manifests.append(given[2]) or 0)
    put(writer, 35, states_at(16))
    ends = [(each.num_positions, each.states and each.states.num_positions) for each in manifests]
    assert ends == [(10, None), (20, None), (20, 16), (30, 16), (35, 16)]


@pytest.mark.parametrize(("num_left", "expected"), [(16, 16), (15, 0)])
def test_a_rewind_drops_states_that_know_what_is_taken_back(
    checkpoints: CheckpointStore, writer: CheckpointWriter, num_left: int, expected: int
) -> None:
    put(writer, 20, states_at(16))
    writer.rewind(JOB, TokenLog(output_ids(10), (Rewind(16, 10),)), num_left)
    assert writer.flush(60)
    found = named(checkpoints)
    assert (found.num_positions if found else 0) == writer.num_positions_of_states(JOB) == expected


def test_a_job_that_goes_on_from_another_has_its_states(
    store: Store, checkpoints: CheckpointStore, writer: CheckpointWriter
) -> None:
    put(writer, 20, states_at(16))
    later = Identity(job_id="job-later", fingerprint=FINGERPRINT)
    inherit(store, later, JOB, checkpoints.history(JOB), TokenLog(output_ids(16)))
    assert named(checkpoints, later.job_id).num_positions == 16


def test_damaged_states_are_named_and_not_used(
    store: Store, checkpoints: CheckpointStore, writer: CheckpointWriter, caplog: pytest.LogCaptureFixture
) -> None:
    put(writer, 20, states_at(16))
    path = f"{FOLDER}/states-16.arrow"
    store.write(path, store.read(path)[:-1])
    assert named(checkpoints) is None
    assert path in caplog.text
