"""A job with rewinds has the same tokens after a kill at any moment."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swiftbatch.jobs.checkpoints.checkpoint_files import SegmentEntry, StateManifest
from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.checkpoints.checkpoint_writer import PendingCheckpoint
from swiftbatch.jobs.checkpoints.kept_logs import KeptLogs
from swiftbatch.jobs.checkpoints.token_log import Rewind, TokenLog
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.storage.store import Store
from swiftbatch.scheduler.driver.queue_loading import put_logs_in_place
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.session.checkpointing import Checkpointing
from swiftbatch.worker.session.resume import _still_valid
from swiftbatch.worker.session.running_job import RunningJob
from tests.worker.session.session_parts import (
    body,
    have_caches_loaded,
    made_with,
    make_run,
    record,
    run_at,
    run_to_end,
)
from tests.worker.session.test_thinking import MARKERS

pytestmark = pytest.mark.long

ENGINES = ["autoregressive", "suffix", "token-recycling"]
WITH_STATE_FIRST = [  # one with state besides its tokens; the others have less to lose
    *(pytest.param(name, marks=pytest.mark.slow) for name in ENGINES[:2]),
    ENGINES[2],
]
REWINDING: dict[str, Any] = {
    "top_k": 3,
    "repetition_penalty": 0.95,
    "presence_penalty": -1.0,
    "repetition_detection": {"max_pattern_size": 4, "min_count": 3, "action": "rewind", "max_rewinds": 3},
}
JOB = record("fox", 80, drawn=REWINDING | {"seed": 1})
OFTEN = {"checkpoint_seconds": 1000.0, "checkpoint_tokens": 1}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, Any]:
    run = make_run(tmp_path_factory.mktemp("undisturbed") / "run")
    run_to_end(run, tiny_model, JOB, engine="autoregressive")
    return outcome(run)


def outcome(run: Run) -> dict[str, Any]:
    found = body(run, JOB)
    metrics = found["metrics"]
    return {**found["choices"][0], **{name: metrics[name] for name in ("num_rewinds", "num_rewound_tokens")}}


@pytest.fixture
def moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Copies of all checkpoints after each written file."""
    copies: list[Path] = []
    write = Store.write

    def copying(store: Store, path: str, data: bytes) -> None:
        write(store, path, data)
        if path.startswith("checkpoints/"):
            copies.append(tmp_path / "moments" / str(len(copies)))
            shutil.copytree(Path(store.uri) / "checkpoints", copies[-1])

    monkeypatch.setattr(Store, "write", copying)
    return copies


def wait_for_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a worker wait for its writer, so that each handover has its moment."""
    put_due, rewind = Checkpointing.put_due, Checkpointing.rewind

    def put_and_wait(self: Checkpointing, jobs: Collection[RunningJob]) -> None:
        put_due(self, jobs)
        assert self._writer.flush(30.0)

    def rewind_and_wait(self: Checkpointing, job: RunningJob, again: Sequence) -> None:
        rewind(self, job, again)
        assert self._writer.flush(30.0)

    monkeypatch.setattr(Checkpointing, "put_due", put_and_wait)
    monkeypatch.setattr(Checkpointing, "rewind", rewind_and_wait)


@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.slow), 5])  # each engine has moments of its own
@pytest.mark.parametrize("loads", [True, False])
@pytest.mark.parametrize("engine", WITH_STATE_FIRST)
def test_a_kill_at_any_moment_costs_no_token_and_no_rewind(
    tmp_path: Path,
    tiny_model: Path,
    undisturbed: dict[str, Any],
    moments: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
    loads: bool,
    stride: int,
) -> None:
    run = make_run(tmp_path / "run")
    if loads:  # otherwise the writer's delay is random
        wait_for_files(monkeypatch)
    often = OFTEN | {"checkpoint_tokens": 1 if stride == 1 else 3}
    run_to_end(run, tiny_model, JOB, engine=engine, **often)
    assert outcome(run) == undisturbed
    assert undisturbed["num_rewinds"] == 3
    monkeypatch.undo()
    have_caches_loaded(monkeypatch, loads)
    ranks = set()
    for number, moment in enumerate(moments, ENGINES.index(engine)):
        again = made_with(run_at(moment, tmp_path / f"again-{number}"), tiny_model)
        put_logs_in_place(again)
        num_rewinds, _ = CheckpointStore.of(again).read_log(JOB.job_id).progress
        if number % stride and num_rewinds in ranks:
            continue
        ranks.add(num_rewinds)
        run_to_end(again, tiny_model, JOB, engine=engine)
        assert outcome(again) == undisturbed, moment
    assert ranks == {0, 1, 2, 3} or not loads


@pytest.mark.parametrize("engine", ["autoregressive", "auto"])
def test_caches_in_files_are_rolled_back_as_well(
    tmp_path: Path, tiny_model: Path, undisturbed: dict[str, Any], engine: str
) -> None:
    run, folder = make_run(tmp_path / "run"), tmp_path / "caches"
    folder.mkdir()
    run_to_end(run, tiny_model, JOB, engine=engine, kv_offload=str(folder), **OFTEN)
    assert outcome(run) == undisturbed


@pytest.mark.parametrize("engine", WITH_STATE_FIRST)
def test_a_loop_within_a_thought_is_taken_back_there_and_the_budget_is_kept_behind_every_kill(
    tmp_path: Path, tiny_model: Path, moments: list[Path], monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    drawn = REWINDING | {"thinking_token_budget": 60, "seed": 2}
    job = record("fox", 100, drawn=drawn, prompt="fox so the")  # which opens a thought

    def result(run: Run, name: str, **changes: Any) -> dict[str, Any]:
        run_to_end(run, tiny_model, job, engine=name, thinking_markers=MARKERS, **changes)
        found = body(run, job)
        return {**found["choices"][0], **found["usage"], "num_rewinds": found["metrics"]["num_rewinds"]}

    plain = make_run(tmp_path / "plain")
    undisturbed = result(plain, "autoregressive")
    taken_back = [rewind.num_tokens for rewind in KeptLogs.of(plain).read(job.job_id).rewinds]
    assert sum(num_tokens < 60 for num_tokens in taken_back) > 1
    assert undisturbed["completion_tokens_details"] == {"reasoning_tokens": 60}
    num_before = len(moments)
    wait_for_files(monkeypatch)
    often = OFTEN | {"checkpoint_tokens": 3}
    assert result(make_run(tmp_path / "run"), engine, **often) == undisturbed
    monkeypatch.undo()
    later = moments[num_before:]
    for number, moment in enumerate(later[:: len(later) // 5]):
        have_caches_loaded(monkeypatch, is_worth_it=number % 2 > 0)
        again = run_at(moment, tmp_path / f"again-{number}")
        assert result(again, engine) == undisturbed, moment


def entry(start: int, end: int) -> SegmentEntry:
    return SegmentEntry(file=f"0001/kv-{start}-{end}.arrow", start=start, end=end, size=1, sha256="0" * 64)


def test_what_rewinds_took_back_is_used_of_no_manifest() -> None:
    sequence = Sequence("s", [1, 2], JOB.job.sampling, 300)
    sequence.set_rewinds((Rewind(30, 18), Rewind(40, 10)))
    sequence.extend(list(range(12)))
    segments = tuple(entry(start, start + 6) for start in range(0, 36, 6))
    manifests = [StateManifest(num_rewinds=number, segments=segments) for number in range(4)]
    kept = {number: _still_valid([manifest], sequence) for number, manifest in enumerate(manifests)}
    assert [[each.num_positions for each in kept[number]] for number in range(4)] == [[12], [12], [36], []]
    pending = PendingCheckpoint("s", 1, "suffix", None, list(segments), token_ids=np.zeros(40, dtype=np.uint32))
    pending.rewind(TokenLog(np.zeros(10, dtype=np.uint32), sequence.rewinds), 13)
    assert (pending.segments, pending.num_positions, pending.num_rewinds) == ([*segments[:2]], 12, 2)
    assert pending.is_manifest_due


def test_nothing_of_a_state_behind_a_lost_rewind_is_used(
    tmp_path: Path,
    tiny_model: Path,
    undisturbed: dict[str, Any],
    moments: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The log is gone, and segments alone do not tell the next noise."""
    wait_for_files(monkeypatch)
    run = make_run(tmp_path / "run")
    run_to_end(run, tiny_model, JOB, **OFTEN | {"checkpoint_tokens": 3})
    monkeypatch.undo()
    again = made_with(make_run(tmp_path / "again"), tiny_model)
    shutil.copytree(moments[-1], Path(again.store.uri) / "checkpoints", dirs_exist_ok=True)
    [manifest, *_] = CheckpointStore.of(again).read_manifests(JOB.job_id)
    assert manifest.num_rewinds > 0
    assert manifest.segments
    again.store.delete(f"checkpoints/{JOB.job_id}/0001/tokens.bin")
    run_to_end(again, tiny_model, JOB)
    assert outcome(again) == undisturbed
