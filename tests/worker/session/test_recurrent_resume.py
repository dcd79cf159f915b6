"""Jobs with layer states: resumes, rewinds, shared prompts, extensions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.run.run import Run
from swiftbatch.worker.kernels.kernel_sizes import BLOCK
from swiftbatch.worker.session.session import WorkerSession
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
    to_the_end,
    undisturbed_digest,
)
from tests.worker.session.test_rewind_resume import moments as moments
from tests.worker.session.test_rewind_resume import wait_for_files

pytestmark = pytest.mark.long

BOOK = "the quick brown fox jumps over the lazy dog. " * 16
JOB = record("fox", 60, prompt=BOOK)


OTHERS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("falcon_h1", "kimi_linear", "nemotron_h")]


@pytest.fixture(scope="module", params=["qwen3_5_text", *OTHERS])
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return save_recurrent_model(tmp_path_factory.mktemp("recurrent-model"), request.param)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> str:
    return undisturbed_digest(tmp_path_factory.mktemp("undisturbed") / "run", model, JOB)


@pytest.fixture(autouse=True)
def _loading_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    have_caches_loaded(monkeypatch)


def handed_back(folder: Path, model: Path) -> Run:
    run = make_run(folder)
    preempted(run, model, JOB, 30, checkpoint="state")
    return run


def test_a_job_goes_on_from_the_states_at_a_boundary_and_reads_only_what_lies_behind(
    tmp_path: Path, model: Path, undisturbed: str
) -> None:
    run = handed_back(tmp_path / "run", model)
    worker = run_to_end(run, model, JOB)
    assert digest(run, JOB) == undisturbed
    resume = body(run, JOB)["metrics"]["attempts"][1]["resume"]
    assert resume["kind"] == "kv"
    assert resume["num_loaded_positions"] % 64 == 0
    assert resume["num_loaded_positions"] >= 64
    assert worker.engine.counters.num_read_tokens < 2 * 64 + 1


@pytest.mark.parametrize("kind", ["kimi_linear", "lfm2", "nemotron_h"])
def test_states_of_other_forms_are_loaded_as_well(tmp_path: Path, kind: str) -> None:
    model = save_recurrent_model(tmp_path / "model", kind)
    undisturbed = undisturbed_digest(tmp_path / "undisturbed", model, JOB)
    run = handed_back(tmp_path / "run", model)
    worker = run_to_end(run, model, JOB)
    assert digest(run, JOB) == undisturbed
    assert worker.engine.counters.num_resumes == {"kv": 1}


@pytest.mark.parametrize("name", ["states-*.arrow", "kv-0-*.arrow"])
def test_without_whole_states_or_the_positions_in_front_of_them_a_job_reads_all_its_tokens(
    tmp_path: Path, model: Path, undisturbed: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = handed_back(tmp_path / "run", model)
    [path, *_] = sorted((Path(run.store.uri) / "checkpoints" / JOB.job_id / "0001").glob(name))
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :])
    worker = run_to_end(run, model, JOB)
    assert digest(run, JOB) == undisturbed
    assert worker.engine.counters.num_resumes == {"replay": 1}
    assert any(path.name in message for message in caplog.messages)


@pytest.mark.parametrize("engine", [pytest.param("autoregressive", marks=pytest.mark.slow), "token-recycling"])
def test_a_kill_at_any_moment_costs_no_token(
    tmp_path: Path, model: Path, undisturbed: str, moments: list[Path], monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    run = make_run(tmp_path / "run")
    with monkeypatch.context() as patch:
        wait_for_files(patch)
        often = {"checkpoint_seconds": 1000.0, "checkpoint_tokens": 16}
        run_to_end(run, model, JOB, engine=engine, checkpoint="state", **often)
    monkeypatch.undo()
    kinds = set()
    for number, moment in enumerate(moments[1::6]):
        have_caches_loaded(monkeypatch, is_worth_it=number % 3 > 0)
        again = run_at(moment, tmp_path / f"again-{number}")
        worker = run_to_end(again, model, JOB, engine=engine)
        assert digest(again, JOB) == undisturbed, moment
        kinds |= set(worker.engine.counters.num_resumes)
    assert kinds == {"kv", "replay"}


def test_a_loop_is_taken_back_exactly_behind_every_kill(
    tmp_path: Path, model: Path, moments: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = record("fox", 230, drawn=LOOPS_OF_80, prompt="the quick brown fox jumps over the lazy dog. " * 7)
    plain = make_run(tmp_path / "plain")
    worker = run_to_end(plain, model, job, engine="autoregressive", checkpoint="tokens")
    assert 0 < worker.engine.counters.num_read_tokens < 130 + 3 * BLOCK, "not all was read again"
    undisturbed, num_before = looping_outcome(plain, job), len(moments)
    assert undisturbed["num_rewinds"] > 0
    run = make_run(tmp_path / "run")
    with monkeypatch.context() as patch:
        wait_for_files(patch)
        often = {"checkpoint_seconds": 1000.0, "checkpoint_tokens": 32}
        run_to_end(run, model, job, checkpoint="state", **often)
    monkeypatch.undo()
    assert looping_outcome(run, job) == undisturbed
    have_caches_loaded(monkeypatch)
    later = moments[num_before:]
    for number, moment in enumerate(later[:: max(1, len(later) // 4)]):
        again = run_at(moment, tmp_path / f"again-{number}")
        run_to_end(again, model, job)
        assert looping_outcome(again, job) == undisturbed, moment


def in_turn(worker: WorkerSession, run: Any, jobs: list[JobRecord], num_shared: int) -> None:
    for job in jobs:
        to_the_end(worker, replace(claimed(run, job), num_shared_tokens=num_shared))


def test_jobs_copy_the_states_of_a_shared_prompt_that_ends_anywhere(tmp_path: Path, model: Path) -> None:
    """One of two jobs reads, the other copies; later ones copy the kept prompt."""
    prompts = [BOOK + ending for ending in ("", "a fox", "the dog", "quick")]
    jobs = [record(f"j{number}", 4, prompt=prompt) for number, prompt in enumerate(prompts)]
    run = make_run(tmp_path / "run")
    worker = session(run, model, checkpoint="tokens")
    num_shared = len(worker._codec.prompt_of(jobs[0].job).token_ids) - 5
    together = [replace(claimed(run, job), num_shared_tokens=num_shared) for job in jobs[:2]]
    to_the_end(worker, *together)
    num_copied = worker.engine.counters.num_copied_tokens
    assert num_copied > 0
    assert num_copied % 64 == 0
    in_turn(worker, run, jobs[2:], num_shared)
    assert worker.engine.counters.num_copied_tokens == 3 * num_copied
    for number, job in enumerate(jobs):
        assert digest(run, job) == undisturbed_digest(tmp_path / f"alone-{number}", model, job)


def test_a_model_whose_layers_all_attend_has_no_states(tmp_path: Path, tiny_model: Path) -> None:
    run = handed_back(tmp_path / "run", tiny_model)
    [manifest] = CheckpointStore.of(run).read_manifests(JOB.job_id)
    assert manifest.segments
    assert manifest.states is None
