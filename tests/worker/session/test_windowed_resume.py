"""Jobs with forgetting window layers.

Forgotten values are NaN here and would spread.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.worker.drafters.catalogue import ENGINES
from swiftbatch.worker.drafters.choice.choosing_drafter import ChoosingDrafter
from swiftbatch.worker.kv.cache_room import CachedJob, CacheRoom
from swiftbatch.worker.kv.kv_capacity import Growth, HeldPositions, pages_of
from swiftbatch.worker.kv.sliding_windows import Window
from swiftbatch.worker.session.checkpointing import num_unwritten
from tests.worker.kv.window_parts import spoil_what_is_forgotten
from tests.worker.session.recurrent_parts import save_recurrent_model
from tests.worker.session.session_parts import (
    LOOPS_OF_80,
    body,
    claimed,
    digest,
    have_caches_loaded,
    looping_outcome,
    make_run,
    preempted,
    record,
    run_at,
    run_to_end,
    session,
    step_one_by_one,
    to_the_end,
    undisturbed_digest,
    until,
)
from tests.worker.session.test_rewind_resume import moments as moments
from tests.worker.session.test_rewind_resume import wait_for_files

pytestmark = pytest.mark.long

BOOK = "the quick brown fox jumps over the lazy dog. " * 5
JOB = record("fox", 450, prompt=BOOK)


@pytest.fixture(autouse=True)
def _forgets_often(monkeypatch: pytest.MonkeyPatch) -> None:
    have_caches_loaded(monkeypatch)
    spoil_what_is_forgotten(monkeypatch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_recurrent_model(tmp_path_factory.mktemp("windowed-model"), "mistral")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> str:
    """The job's digest if caches forget nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Window, "forget", lambda *_: None)
        return undisturbed_digest(tmp_path_factory.mktemp("undisturbed") / "run", model, JOB)


@pytest.mark.parametrize("engine", ["auto", "suffix", "autoregressive"])
def test_jobs_have_the_tokens_of_caches_that_forget_nothing(
    tmp_path: Path, model: Path, undisturbed: str, engine: str
) -> None:
    run = make_run(tmp_path / "run")
    run_to_end(run, model, JOB, engine=engine)
    assert digest(run, JOB) == undisturbed


@pytest.mark.parametrize("damaged", [None, "kv-256-*.arrow"])
def test_a_job_goes_on_from_segments_that_end_anywhere(
    tmp_path: Path, model: Path, undisturbed: str, damaged: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_one_by_one(monkeypatch)
    run = make_run(tmp_path / "run")
    preempted(run, model, JOB, 400, checkpoint="state", checkpoint_tokens=128)
    for path in (Path(run.store.uri) / "checkpoints" / JOB.job_id / "0001").glob(damaged or "nothing"):
        path.write_bytes(path.read_bytes()[:100])
    worker = run_to_end(run, model, JOB)
    assert digest(run, JOB) == undisturbed
    assert worker.engine.counters.num_resumes == {"kv": 1}
    num_loaded = body(run, JOB)["metrics"]["attempts"][1]["resume"]["num_loaded_positions"]
    assert num_loaded == 256 if damaged else num_loaded > 400


def test_a_job_that_is_replayed_forgets_as_it_goes(
    tmp_path: Path, model: Path, undisturbed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_caches_loaded(monkeypatch, is_worth_it=False)
    run = make_run(tmp_path / "run")
    preempted(run, model, JOB, 400, checkpoint="state")
    worker = run_to_end(run, model, JOB)
    assert digest(run, JOB) == undisturbed
    assert worker.engine.counters.num_resumes == {"replay": 1}


def test_a_kill_at_any_moment_costs_no_token(
    tmp_path: Path, model: Path, undisturbed: str, moments: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run")
    with monkeypatch.context() as patch:
        wait_for_files(patch)
        often = {"checkpoint_seconds": 1000.0, "checkpoint_tokens": 48}
        run_to_end(run, model, JOB, checkpoint="state", **often)
    num_moments = len(moments)
    for number, moment in enumerate(moments[3 : num_moments : num_moments // 3]):
        again = run_at(moment, tmp_path / f"again-{number}")
        run_to_end(again, model, JOB)
        assert digest(again, JOB) == undisturbed, moment


def test_a_loop_is_taken_back_exactly_behind_every_kill(
    tmp_path: Path, model: Path, moments: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = record("fox", 230, drawn=LOOPS_OF_80, prompt=5 * BOOK)
    plain = make_run(tmp_path / "plain")
    with monkeypatch.context() as patch:
        patch.setattr(Window, "forget", lambda *_: None)
        run_to_end(plain, model, job, engine="autoregressive", checkpoint="tokens")
    undisturbed, num_before = looping_outcome(plain, job), len(moments)
    assert undisturbed["num_rewinds"] > 0
    run = make_run(tmp_path / "run")
    with monkeypatch.context() as patch:
        wait_for_files(patch)
        often = {"checkpoint_seconds": 1000.0, "checkpoint_tokens": 32}
        run_to_end(run, model, job, checkpoint="state", **often)
    assert looping_outcome(run, job) == undisturbed
    later = moments[num_before:]
    for number, moment in enumerate(later[3 :: len(later) // 2]):
        again = run_at(moment, tmp_path / f"again-{number}")
        run_to_end(again, model, job)
        assert looping_outcome(again, job) == undisturbed, moment


def test_a_loop_that_began_before_a_kill_is_taken_back_without_another_look_at_the_text(
    tmp_path: Path, model: Path
) -> None:
    repeated = {"max_pattern_size": 1, "min_count": 200, "action": "rewind", "max_rewinds": 2}
    job = record("fox", 260, drawn=LOOPS_OF_80 | {"repetition_detection": repeated}, prompt=5 * BOOK)
    run = make_run(tmp_path)
    preempted(run, model, job, 150, engine="autoregressive", checkpoint="state")
    worker = run_to_end(run, model, job, engine="autoregressive")
    assert body(run, job)["metrics"]["num_rewinds"] > 0
    assert worker.engine.counters.num_resumes == {"kv": 1}
    assert worker.engine.counters.num_read_tokens == 0


ALIKE = [record(f"j{number}", 250, prompt=4 * BOOK + ending) for number, ending in enumerate(("", "a fox", "the dog"))]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, model: Path) -> list[str]:
    return [undisturbed_digest(tmp_path_factory.mktemp("alone") / "run", model, job) for job in ALIKE]


@pytest.mark.parametrize("checkpoint", ["state", "tokens"])
def test_jobs_copy_a_shared_prompt_that_the_first_has_long_passed(
    tmp_path: Path, model: Path, alone: list[str], checkpoint: str
) -> None:
    """One of two jobs reads, the other copies; a later one copies the kept prompt."""
    jobs, run = ALIKE, make_run(tmp_path / "run")
    worker = session(run, model, checkpoint=checkpoint)
    num_shared = len(worker._codec.prompt_of(jobs[0].job).token_ids) - 1
    to_the_end(worker, *(replace(claimed(run, job), num_shared_tokens=num_shared) for job in jobs[:2]))
    to_the_end(worker, replace(claimed(run, jobs[2]), num_shared_tokens=num_shared))
    assert worker.engine.counters.num_copied_tokens >= 2 * num_shared
    assert [digest(run, job) for job in jobs] == alone


def test_segments_of_a_job_that_is_kept_have_all_positions(tmp_path: Path, model: Path) -> None:
    """An extended job may load any segment last."""
    for number, changes in enumerate(({"checkpoint": "state"}, {"checkpoint": "tokens"})):
        run = make_run(tmp_path / f"run-{number}")
        run_to_end(run, model, JOB, keep_state=True, checkpoint_tokens=64, **changes)
        store = CheckpointStore.of(run)
        [manifest] = store.read_manifests(JOB.job_id)
        segments = [store.read_segment(JOB.job_id, entry) for entry in manifest.segments]
        assert len(segments) > 4
        assert all(segment is not None and segment.kv.view("float32").max() < 1e9 for segment in segments)


@pytest.mark.parametrize("engine", ["auto", "triforce"])
def test_caches_of_jobs_forget_unless_drafts_read_them(
    tmp_path: Path, model: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChoosingDrafter, "reads_caches", ENGINES[engine].reads_caches)  # triforce has no part here
    run = make_run(tmp_path / "run")
    worker = session(run, model, engine="auto", checkpoint="tokens")
    until(worker, JOB, 300, claimed(run, JOB))
    [job] = worker._running.values()
    assert (job.cache.num_held < job.cache.length) == (engine == "auto")


def test_a_worker_counts_what_its_caches_hold(tmp_path: Path, model: Path) -> None:
    run = make_run(tmp_path / "run")
    worker = session(run, model, checkpoint="tokens")
    assert worker.held_positions == worker.engine.target.cache_room(0).held
    assert worker.held_positions is not None
    cache = worker.engine.target.new_cache(1)
    jobs = [CachedJob(cache, Growth(5000, 5000, num_shared)) for num_shared in (0, 2000)]
    room = CacheRoom(held=HeldPositions(1000, 0.25))
    assert [room.num_taken([job]) for job in jobs] == [pages_of(1000 + 1000), pages_of(2000 + 1000 + 500)]
    for changes in ({"engine": "triforce"}, {"checkpoint": "tokens", "keep_state": True}):
        assert num_unwritten(replace(worker._config, **changes)) is None
