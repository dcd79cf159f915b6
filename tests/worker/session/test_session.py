from __future__ import annotations

import contextlib
import os
import shutil
import signal
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.checkpoints.token_log import PackedLogs
from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.job import JobRecord, Message, packed
from swiftbatch.jobs.run.output_table import METRIC_COLUMNS
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.jobs.storage.store import Store, StoreError
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.session import checkpointing
from swiftbatch.worker.session.work_messages import Assignment, Orders
from swiftbatch.worker.text.chat_template import ChatTemplate
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.jobs.checkpoints.checkpoint_parts import claim
from tests.worker.session.session_parts import (
    NUM_TOKENS,
    body,
    claimed,
    digest,
    made_with,
    make_run,
    preempted,
    record,
    run_to_end,
    session,
    to_the_end,
    undisturbed_digest,
    until,
)

HUGE = SamplingParams(max_tokens=2**31 - 1, seed=1)  # its cache would take terabytes


@pytest.fixture
def undisturbed(tmp_path: Path, tiny_model: Path) -> str:
    return undisturbed_digest(tmp_path / "undisturbed", tiny_model, record("fox"))


def test_finished_jobs_have_results_and_no_checkpoints(run: Run, tiny_model: Path) -> None:
    jobs = [record("fox"), record("dog")]
    report = to_the_end(session(run, tiny_model), *(claimed(run, job) for job in jobs))
    assert {outcome.job_id for outcome in report.of("finished")} == run.ended()[0] == {job.job_id for job in jobs}
    assert set(run.store.list("checkpoints")) <= {"workers"}
    assert PackedLogs.of(run).read().keys() <= {job.job_id for job in jobs}
    found = body(run, jobs[0])
    assert found["usage"]["completion_tokens"] == NUM_TOKENS
    assert found["choices"][0]["finish_reason"] == "length"
    assert found["metrics"]["mean_acceptance_length"] >= 1
    assert found["metrics"]["exactness"] == "exact"
    assert {name for name, value in found["metrics"].items() if type(value) in (int, float)} == {*METRIC_COLUMNS}
    [attempt] = found["metrics"]["attempts"]
    assert (attempt["worker_id"], attempt["resume"]) == ("w0", None)


def test_one_job_s_fault_fails_that_job_alone(run: Run, tiny_model: Path) -> None:
    huge = JobRecord("huge-1", record("dog").job.model_copy(update={"sampling": HUGE}), 2, 5)
    good = record("fox")
    report = to_the_end(session(run, tiny_model), claimed(run, huge), claimed(run, good))
    assert [outcome.job_id for outcome in report.of("finished")] == [good.job_id]
    [(job_id, reason)] = [(each.job_id, each.reason) for each in report.of("failed")]
    assert job_id == "huge-1"
    assert "allocate" in reason


def test_a_job_of_an_older_version_whose_structure_is_refused_now_fails_at_once_and_alone(
    run: Run, tiny_model: Path
) -> None:
    dear = record("dog", drawn={"structured_outputs": {"regex": "(.{1,100}){100}"}, "ignore_eos": False})
    no_budget = record("cat", drawn={"thinking_token_budget": 5})  # without thinking markers
    good = record("fox")
    report = to_the_end(session(run, tiny_model), *(claimed(run, job) for job in (dear, no_budget, good)))
    assert [outcome.job_id for outcome in report.of("finished")] == [good.job_id]
    assert report.of("failed") == []
    assert [(each.job_id, each.error_code) for each in report.of("refused")] == [
        (dear.job_id, "constraint_refused"),
        (no_budget.job_id, "constraint_refused"),
    ]
    assert report.of("refused")[0].reason.startswith("field 'structured_outputs.regex': it is too large to follow")


def test_a_worker_refuses_kernels_that_it_would_not_run(run: Run, tiny_model: Path) -> None:
    with pytest.raises(ModelError, match=r"^--linear triton: a choice of kernels on a GPU, but the device is a CPU"):
        session(run, tiny_model, device="cpu", linear="triton")


def test_cancelled_jobs_are_dropped_without_a_result(run: Run, tiny_model: Path) -> None:
    worker = session(run, tiny_model)
    fox, dog = record("fox"), record("dog")
    worker.work(Orders((claimed(run, fox), claimed(run, dog))), 0.0)
    worker.work(Orders(cancelled=(fox.job_id, "unknown")), 0.0)
    report = to_the_end(worker)
    assert [outcome.job_id for outcome in report.of("finished")] == [dog.job_id]
    assert run.ended()[0] == {dog.job_id}


def test_the_metrics_endpoint_shows_what_was_generated(run: Run, tiny_model: Path) -> None:
    worker = run_to_end(run, tiny_model, record("fox"), metrics_host="127.0.0.1")
    with urllib.request.urlopen(str(worker.metrics_address), timeout=60) as page:
        text = page.read().decode()
    assert "swiftbatch_generation_tokens_total{" in text
    assert f" {NUM_TOKENS}.0" in text


def test_a_released_job_goes_on_elsewhere_where_it_stopped(run: Run, tiny_model: Path, undisturbed: str) -> None:
    worker, fox, dog = session(run, tiny_model, checkpoint_seconds=60.0), record("fox"), record("dog")
    num_tokens = until(worker, fox, 50, claimed(run, fox), claimed(run, dog))
    report = worker.work(Orders(released=(fox.job_id,)), 0.0)
    assert [(p.job_id, p.num_generated_tokens) for p in report.of("released")] == [(fox.job_id, num_tokens)]
    assert [outcome.job_id for outcome in report.of("running")] == [dog.job_id]
    other = session(run, tiny_model, engine="suffix")
    to_the_end(other, claimed(run, fox, num_reported_tokens=num_tokens))
    assert digest(run, fox) == undisturbed
    metrics = body(run, fox)["metrics"]
    assert (metrics["num_recovered_tokens"], metrics["num_recomputed_tokens"]) == (num_tokens, 0)
    assert metrics["attempts"][1]["resume"]["num_recovered_tokens"] == num_tokens


@pytest.mark.parametrize("checkpoint", ["tokens", "state"])
def test_sigterm_hands_every_job_back_with_its_newest_token(
    run: Run, tiny_model: Path, undisturbed: str, checkpoint: str
) -> None:
    worker, fox, dog = (
        session(run, tiny_model, checkpoint=checkpoint, checkpoint_seconds=60.0),
        record("fox"),
        record("dog"),
    )
    before = signal.signal(signal.SIGTERM, lambda *_: worker.request_drain())
    try:
        num_tokens = until(worker, fox, 50, claimed(run, fox), claimed(run, dog))
        os.kill(os.getpid(), signal.SIGTERM)
        report = worker.work(Orders(), 60.0)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert report.is_draining
    assert {outcome.job_id for outcome in report.of("released")} == {fox.job_id, dog.job_id}
    assert not report.of("running")
    assert len(CheckpointStore.of(run).read_log(fox.job_id).token_ids) >= num_tokens
    assert bool(CheckpointStore.of(run).read_manifests(fox.job_id)) == (checkpoint == "state")
    run_to_end(run, tiny_model, fox)
    assert digest(run, fox) == undisturbed


def test_an_overtaken_attempt_writes_no_result_and_leaves_its_successor_alone(
    run: Run, tiny_model: Path, undisturbed: str
) -> None:
    stale, job = session(run, tiny_model), record("fox")
    until(stale, job, 50, claimed(run, job))
    successor = session(run, tiny_model)
    until(successor, job, 100, claimed(run, job))
    report = to_the_end(stale)
    assert not report.of("finished")
    [(job_id, reason)] = [(each.job_id, each.reason) for each in report.of("failed")]
    assert (job_id, reason) == (job.job_id, "attempt 1 was overtaken by attempt 2")
    assert stale.engine.counters.num_stale_attempt_rejections == 1
    assert not run.ended()[0]
    assert "0002" in run.store.list(f"checkpoints/{job.job_id}")
    to_the_end(successor)
    assert digest(run, job) == undisturbed


def test_a_store_that_fails_for_good_blames_no_job(tmp_path: Path, tiny_model: Path) -> None:
    run, job = make_run(tmp_path / "run"), record("fox", 100_000)
    worker = session(run, tiny_model, store_retry_seconds=0.0)
    until(worker, job, 50, claimed(run, job))
    in_the_way, checkpoints = tmp_path / "in the way", tmp_path / "run" / "checkpoints"
    in_the_way.touch()
    for number in range(100):  # the writer may recreate the folder in between
        with contextlib.suppress(FileNotFoundError):  # it may not exist yet
            checkpoints.rename(tmp_path / f"elsewhere-{number}")
        with contextlib.suppress(IsADirectoryError):
            in_the_way.rename(checkpoints)
            break
    with pytest.raises(StoreError, match="checkpoints"):
        to_the_end(worker)


def test_a_job_whose_attempts_had_other_numerics_is_marked(run: Run, tiny_model: Path) -> None:
    job = record("fox")
    claim(CheckpointStore.of(made_with(run, tiny_model)), job.job_id, "w9", "cuda, another machine")
    worker = session(run, tiny_model)
    attempt = claim(CheckpointStore.of(run), job.job_id, "w0", worker.numerics)
    to_the_end(worker, Assignment.of(job, attempt, attempt))
    assert body(run, job)["metrics"]["exactness"] == "exact up to ties"


def test_jobs_that_end_before_a_checkpoint_is_due_cost_their_results_alone(
    run: Run, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [record(name, 8) for name in ("fox", "dog", "cat")]
    assignments = [claimed(run, job) for job in jobs]
    worker = session(run, tiny_model, checkpoint_seconds=1000.0, checkpoint_tokens=1000)
    asked, ask = [], Store._try

    def asking(store: Store, action: str, path: str, *rest: Any, **how: Any) -> Any:
        asked.append((action, path.partition("/")[0]))
        return ask(store, action, path, *rest, **how)

    monkeypatch.setattr(Store, "_try", asking)
    to_the_end(worker, *assignments)
    # their tokens are kept because each could be extended
    assert sorted(asked) == [("write", "results"), *[("write", "tokens")] * 3]


def test_a_long_job_costs_a_write_an_interval_beside_its_states(
    run: Run, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [record(name, 160) for name in ("fox", "dog", "cat")]
    assignments = [claimed(run, job) for job in jobs]
    worker = session(run, tiny_model, engine="suffix", checkpoint="tokens", checkpoint_seconds=1000.0)
    asked, ask = [], Store._try

    def asking(store: Store, action: str, path: str, *rest: Any, **how: Any) -> Any:
        asked.append((action, path.split("/")[1]))
        return ask(store, action, path, *rest, **how)

    monkeypatch.setattr(Store, "_try", asking)
    until(worker, jobs[0], 80, *assignments)
    worker._checkpointing._writer.flush(60.0)
    num_written = asked.count(("write", "workers"))
    assert set(asked) <= {("write", "workers"), ("delete", "workers")}  # a second write deletes the first one
    assert 1 <= num_written <= 3 * 3  # every 32 tokens of the first one, for all three


def test_states_come_the_more_seldom_the_older_a_job_is(
    run: Run, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointing, "REPLAYED_SHARE", 0.25)
    job, least = record("fox", 300), 16
    worker = session(run, tiny_model, checkpoint_tokens=least)
    until(worker, job, 250, claimed(run, job))
    assert worker._checkpointing._writer.flush(60)
    [manifest] = CheckpointStore.of(run).read_manifests(job.job_id)
    sizes = [entry.end - entry.start for entry in manifest.segments]
    assert all(size >= max(least, entry.end // 4) for size, entry in zip(sizes, manifest.segments, strict=True))
    assert sizes[-1] > 2 * least


def test_no_worker_makes_a_prompt_again(
    run: Run, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template prints the time, which differs when a run continues the next day."""
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (model / "chat_template.jinja").write_text("{{ messages[0].content }} {{ strftime_now('%d %B %Y') }}")
    said = {"url": "/v1/chat/completions", "prompt": None, "messages": (Message(role="user", content="fox"),)}
    prompts = {}
    for day in ("28", "29"):
        codec = TextCodec(locate_model(str(model)), clock=f"2026-11-{day}T00:00:00+00:00")
        prompts[day] = packed(codec.prompt_of(record("fox", **said).job).token_ids)
    assert prompts["28"] != prompts["29"]
    job = replace(record("fox", 60, **said), prompt_token_ids=prompts["28"])
    whole = undisturbed_digest(tmp_path / "whole", model, job)
    monkeypatch.setattr(TextCodec, "encode_all", None)
    monkeypatch.setattr(ChatTemplate, "render", None)
    preempted(run, model, job, 20)
    run_to_end(run, model, job)
    assert digest(run, job) == whole
    attempts = body(run, job)["metrics"]["attempts"]
    assert len(attempts) == 2
