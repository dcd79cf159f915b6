"""Resume by loading or replay, whichever is faster, with the same tokens."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swiftbatch.jobs.checkpoints.checkpoint_files import StateManifest
from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.run.run import Run
from swiftbatch.worker.forward import step_costs
from swiftbatch.worker.forward.step_costs import StepCosts
from swiftbatch.worker.forward.target_model import DTYPES, TargetModel
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.session.work_messages import Orders
from tests.worker.session.recurrent_parts import save_recurrent_model
from tests.worker.session.session_parts import (
    NUM_TOKENS,
    body,
    claimed,
    digest,
    have_caches_loaded,
    preempted,
    record,
    run_to_end,
    session,
    to_the_end,
    undisturbed_body,
    undisturbed_digest,
    until,
)

pytestmark = pytest.mark.long

ENGINES = ["autoregressive", "suffix", "token-recycling"]
TWO_ENGINES = [pytest.param("autoregressive", marks=pytest.mark.slow), *ENGINES[1:]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> str:
    return undisturbed_digest(tmp_path_factory.mktemp("undisturbed"), tiny_model, record("fox"))


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, dict[str, Any]]:
    fields = {"structured": STRUCTURED, "adjusted": ADJUSTED, "looping": LOOPING}
    return {
        name: undisturbed_body(tmp_path_factory.mktemp("whole"), tiny_model, record("fox", drawn=drawn))
        for name, drawn in fields.items()
    }


@pytest.fixture(autouse=True)
def _loading_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    have_caches_loaded(monkeypatch)


@pytest.mark.sample(4)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", ["kv", "replay"])
def test_a_lost_worker_s_job_goes_on_elsewhere_with_the_same_tokens(
    run: Run, tiny_model: Path, undisturbed: str, engine: str, kind: str
) -> None:
    had = preempted(
        run, tiny_model, record("fox"), 100, engine=engine, checkpoint="state" if kind == "kv" else "tokens"
    )
    job, successor = record("fox"), session(run, tiny_model, engine=engine)
    to_the_end(successor, claimed(run, job, num_reported_tokens=NUM_TOKENS))
    assert digest(run, job) == undisturbed
    counters = successor.engine.counters
    assert counters.num_resumes == {kind: 1}
    assert counters.num_tokens_recovered == had
    assert counters.num_tokens_recomputed == NUM_TOKENS - had
    found = body(run, job)["metrics"]["attempts"][1]["resume"]
    assert found["kind"] == kind
    assert (found["num_loaded_positions"] >= had) == (kind == "kv")
    assert found["seconds"] > 0


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ["kv", "replay", "offloaded"])
def test_a_job_with_latent_vectors_in_its_cache_goes_on_with_the_same_tokens(
    run: Run, tmp_path: Path, kind: str
) -> None:
    model, job = save_recurrent_model(tmp_path / "model", "glm4_moe_lite"), record("fox", 60)
    expected = undisturbed_digest(tmp_path / "alone", model, job)
    changes = {"kv_offload": str(tmp_path)} if kind == "offloaded" else {}
    preempted(run, model, job, 30, checkpoint="tokens" if kind == "replay" else "state", **changes)
    run_to_end(run, model, job, engine="auto", **changes)
    assert digest(run, job) == expected
    assert body(run, job)["metrics"]["attempts"][1]["resume"]["kind"] == ("replay" if kind == "replay" else "kv")


@pytest.mark.parametrize("is_alike", [True, False])
def test_a_cache_that_was_computed_with_other_numerics_is_computed_again(
    run: Run, tiny_model: Path, undisturbed: str, is_alike: bool
) -> None:
    """The cache's bits differ, or even their meaning if heads are stored in another order."""
    job, worker = record("fox"), session(run, tiny_model, checkpoint="state")
    numerics = worker.numerics if is_alike else "cpu, another machine"
    worker.numerics = numerics
    until(worker, job, 100, claimed(run, job))
    worker.drain(30.0)
    successor = session(run, tiny_model, checkpoint="state")
    had = until(successor, job, 150, claimed(run, job))
    assert successor.engine.counters.num_resumes == {"kv" if is_alike else "replay": 1}
    successor.drain(30.0)
    first, second = CheckpointStore.of(run).attempts(job.job_id)
    manifest = CheckpointStore.of(run).read_manifest(job.job_id, second)
    assert manifest is not None
    assert {entry.attempt for entry in manifest.segments} == ({first, second} if is_alike else {second})
    to_the_end(session(run, tiny_model), claimed(run, job, num_reported_tokens=had))
    assert digest(run, job) == undisturbed


def test_a_cache_whose_claim_is_damaged_is_computed_again(run: Run, tiny_model: Path, undisturbed: str) -> None:
    job = record("fox")
    had = preempted(run, tiny_model, record("fox"), 100, checkpoint="state")
    (Path(run.store.uri) / "checkpoints" / job.job_id / "0001" / "claim.json").write_bytes(b"{")
    successor = session(run, tiny_model, checkpoint="state")
    to_the_end(successor, claimed(run, job, num_reported_tokens=had))
    assert successor.engine.counters.num_resumes == {"replay": 1}
    assert digest(run, job) == undisturbed


ADJUSTED = {
    "frequency_penalty": 0.3,
    "presence_penalty": -0.4,
    "logit_bias": {"17": 3.0, "40": -100},
    "min_tokens": 130,
    "stop_token_ids": list(range(20, 30)),
    "include_stop_str_in_output": True,
    "bad_words": ["the", "the quick"],
}


LOOPING = {
    "temperature": 0.0,
    "repetition_penalty": 1.0,
    "repetition_detection": {"max_pattern_size": 16, "min_count": 8},
}


STRUCTURED = {
    "max_tokens": 500,
    "ignore_eos": False,
    "structured_outputs": {"regex": "(the [a-z]{1,9}( |, )){20,24}[.]"},
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("engine", TWO_ENGINES)
@pytest.mark.parametrize("kind", ["state", "tokens"])
def test_a_grammar_goes_on_where_it_stood_in_another_worker(
    run: Run, wholes: dict[str, dict[str, Any]], tiny_model: Path, engine: str, kind: str
) -> None:
    job = record("fox", drawn=STRUCTURED)
    [undisturbed] = wholes["structured"]["choices"]
    preempted(run, tiny_model, job, 60, engine=engine, checkpoint=kind)
    run_to_end(run, tiny_model, job, engine=engine)
    assert body(run, job)["choices"] == [undisturbed]
    assert undisturbed["finish_reason"] == "stop"
    assert re.fullmatch(STRUCTURED["structured_outputs"]["regex"], undisturbed["text"])


@pytest.mark.sample(3)
@pytest.mark.parametrize("engine", TWO_ENGINES)
@pytest.mark.parametrize("kind", ["state", "tokens"])
def test_counts_masks_and_bias_are_the_same_in_another_worker(
    run: Run, wholes: dict[str, dict[str, Any]], tiny_model: Path, engine: str, kind: str
) -> None:
    job = record("fox", drawn=ADJUSTED)
    [undisturbed] = wholes["adjusted"]["choices"]
    assert preempted(run, tiny_model, job, 100, engine=engine, checkpoint=kind) < 130
    run_to_end(run, tiny_model, job, engine=engine)
    assert body(run, job)["choices"] == [undisturbed]
    assert (undisturbed["finish_reason"], body(run, job)["usage"]["completion_tokens"] > 130) == ("stop", True)


@pytest.mark.sample(3)
@pytest.mark.parametrize("engine", TWO_ENGINES)
@pytest.mark.parametrize("num_tokens", [100, 1000])
def test_a_loop_is_found_at_the_same_token_after_a_resume(
    run: Run, wholes: dict[str, dict[str, Any]], tiny_model: Path, engine: str, num_tokens: int
) -> None:
    """Everything except the result is logged at `num_tokens` 1000."""
    job, whole = record("fox", drawn=LOOPING), wholes["looping"]
    length = whole["usage"]["completion_tokens"]
    assert (whole["choices"][0]["finish_reason"], 100 < length < NUM_TOKENS) == ("repetition", True)
    worker, assignment = session(run, tiny_model, engine=engine), claimed(run, job)
    worker.work(Orders((assignment,)), 0.0)
    [sequence] = worker.engine.sequences
    while sequence.num_generated_tokens < min(num_tokens, length):
        worker.engine.step()
    worker.drain(30.0)
    run_to_end(run, tiny_model, job, engine=engine)
    assert body(run, job)["choices"] == whole["choices"]


def test_a_third_attempt_goes_on_from_the_segments_of_the_first_two(
    run: Run, tiny_model: Path, undisturbed: str
) -> None:
    preempted(run, tiny_model, record("fox"), 70)
    first = {entry.file for entry in CheckpointStore.of(run).read_manifests(record("fox").job_id)[0].segments}
    preempted(run, tiny_model, record("fox"), 140)
    manifest = CheckpointStore.of(run).read_manifests(record("fox").job_id)[0]
    files = {entry.file for entry in manifest.segments}
    assert first < files
    assert {file.split("/")[0] for file in files} == {"0001", "0002"}
    worker = run_to_end(run, tiny_model, record("fox"))
    assert digest(run, record("fox")) == undisturbed
    assert worker.engine.counters.num_resumes == {"kv": 1}


def test_replay_is_taken_where_loading_would_take_longer(
    run: Run, tiny_model: Path, undisturbed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    preempted(run, tiny_model, record("fox"), 100)
    segments = CheckpointStore.of(run).read_manifests(record("fox").job_id)[0].segments
    have_caches_loaded(monkeypatch, is_worth_it=False)  # a target that is faster than any store
    worker = session(run, tiny_model)
    until(worker, record("fox"), 180, claimed(run, record("fox")))
    worker.drain(30.0)
    assert worker.engine.counters.num_resumes == {"replay": 1}
    kept = CheckpointStore.of(run).read_manifests(record("fox").job_id)[0].segments
    assert set(kept) >= set(segments[:-1])  # no complete segment is written twice
    have_caches_loaded(monkeypatch)
    run_to_end(run, tiny_model, record("fox"))
    assert digest(run, record("fox")) == undisturbed


def test_step_costs_are_measured_once_and_only_where_somebody_asks(
    run: Run, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, targets = step_costs.measure_step_costs, []

    def measure_and_tell(target: TargetModel) -> StepCosts:
        targets.append(target)
        return measure(target)

    monkeypatch.setattr(step_costs, "measure_step_costs", measure_and_tell)
    run_to_end(run, tiny_model, record("dog", 8), engine="autoregressive")
    assert targets == []  # nothing is drafted, and nothing was resumed
    preempted(run, tiny_model, record("fox"), 40)
    assert len(targets) == 1  # for the drafter
    run_to_end(run, tiny_model, record("fox"))
    assert len(targets) == 2  # for the drafter and the resume


def test_tokens_are_taken_from_segments_where_the_log_is_gone(run: Run, tiny_model: Path, undisturbed: str) -> None:
    had = preempted(run, tiny_model, record("fox"), 100)
    job = record("fox")
    run.store.delete(f"checkpoints/{job.job_id}/0001/tokens.bin")
    worker = run_to_end(run, tiny_model, job)
    assert digest(run, job) == undisturbed
    assert had - 2 <= worker.engine.counters.num_tokens_recovered <= had


def test_segments_of_other_tokens_are_named_and_left_out(
    run: Run, tiny_model: Path, undisturbed: str, caplog: pytest.LogCaptureFixture
) -> None:
    preempted(run, tiny_model, record("fox"), 100)
    job, checkpoints = record("fox"), CheckpointStore.of(run)
    token_ids = checkpoints.read_log(job.job_id).token_ids
    token_ids[50] += 1  # as another machine might draw at a tie
    checkpoints.write_tokens(job.job_id, 1, token_ids)
    worker = session(run, tiny_model)
    worker.work(Orders((claimed(run, job),)), 0.0)
    assert "found other tokens" in caplog.text
    assert "kv-" in caplog.text
    assert worker.engine.sequences[0].token_ids[-len(token_ids) :].tolist() == token_ids.tolist()


def test_a_segment_of_another_prompt_is_not_said_to_be_of_other_hardware(
    run: Run, tiny_model: Path, undisturbed: str, caplog: pytest.LogCaptureFixture
) -> None:
    preempted(run, tiny_model, record("fox"), 100)
    job, checkpoints = record("fox"), CheckpointStore.of(run)
    [manifest] = checkpoints.read_manifests(job.job_id)
    first = checkpoints.read_segment(job.job_id, manifest.segments[0])
    assert first is not None
    token_ids = first.token_ids.copy()
    token_ids[0] += 1  # as in another job's file with this one's name
    entry = checkpoints.write_segment(job.job_id, 1, replace(first, token_ids=token_ids))
    checkpoints.write_manifest(job.job_id, 1, StateManifest(segments=(entry,)))
    run_to_end(run, tiny_model, job)
    assert "found the tokens of another prompt" in caplog.text
    assert "hardware" not in caplog.text
    assert digest(run, job) == undisturbed


def test_a_log_of_tokens_that_no_vocabulary_has_is_named_and_left_out(
    run: Run, tiny_model: Path, undisturbed: str, caplog: pytest.LogCaptureFixture
) -> None:
    preempted(run, tiny_model, record("fox"), 100, checkpoint="tokens")
    job = record("fox")
    CheckpointStore.of(run).write_tokens(job.job_id, 1, np.full(120, 10**9, dtype=np.uint32))
    run_to_end(run, tiny_model, job)
    assert digest(run, job) == undisturbed
    assert "found tokens outside of the vocabulary" in caplog.text


def test_another_engine_goes_on_and_leaves_the_drafter_state_alone(
    run: Run, tiny_model: Path, undisturbed: str, caplog: pytest.LogCaptureFixture
) -> None:
    preempted(run, tiny_model, record("fox"), 100, engine="token-recycling")
    run_to_end(run, tiny_model, record("fox"), engine="suffix")
    assert digest(run, record("fox")) == undisturbed
    assert "drafter" not in caplog.text


def test_a_drafter_goes_on_with_what_it_knew(run: Run, tiny_model: Path) -> None:
    job, worker = record("fox"), session(run, tiny_model)
    until(worker, job, 100, claimed(run, job))
    state = worker.engine.drafter.state(worker.engine.sequences[0])
    worker.drain(30.0)
    successor = session(run, tiny_model)
    successor.work(Orders((claimed(run, job),)), 0.0)
    found = successor.engine.drafter.state(successor.engine.sequences[0])
    for name, array in state.items():
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_cache_gives_its_positions_out_and_takes_them_back_bit_for_bit(target: TargetModel, dtype: str) -> None:
    shape = CacheShape(2, 2, 8, DTYPES[dtype], target.device)
    source, copy = FullKVCache(shape, 50), FullKVCache(shape, 50)
    for layer in range(2):
        for part in source.layer(layer):
            part.normal_()
    source.advance(40)
    kv = source.kv(0, 30)
    assert kv.shape == (8, 30, 8)
    copy.load(kv)
    copy.load(source.kv(30, 40))
    assert copy.length == 40
    for layer in range(2):
        for ours, theirs in zip(copy.layer(layer), source.layer(layer), strict=True):
            assert ours[:, :40].equal(theirs[:, :40])


def test_a_cache_refuses_what_does_not_fit(target: TargetModel) -> None:
    cache = FullKVCache(CacheShape(2, 2, 8, DTYPES["bfloat16"], target.device), 50)
    for wrong in (
        np.zeros((8, 51, 8), np.uint16),
        np.zeros((4, 10, 8), np.uint16),
        np.zeros((8, 10, 4), np.uint16),
        np.zeros((8, 10, 8), np.float32),
    ):
        with pytest.raises(ValueError, match="expected uint16"):
            cache.load(wrong)
    assert cache.length == 0
