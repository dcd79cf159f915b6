"""An extended job has the tokens of one with the larger limit from the start."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from swiftbatch.jobs.checkpoints.kept_logs import KeptLogs
from swiftbatch.jobs.input.line_parsing import JobLine
from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.run.result_files import ResultSegment
from swiftbatch.jobs.run.run import Run
from swiftbatch.worker.drafters.catalogue import ENGINES
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.scheduler.runs.extension_parts import extend, run_all
from tests.worker.session.recurrent_parts import save_recurrent_model
from tests.worker.session.session_parts import body, claimed, digest, make_run, record, run_to_end, session, until
from tests.worker.session.test_rewind_resume import REWINDING

pytestmark = pytest.mark.long

FIRST, LONGER = 90, 200
DRAWN = {
    "frequency_penalty": 0.3,
    "presence_penalty": -0.4,
    "logit_bias": {"17": 3.0, "40": -100},
    "min_tokens": FIRST,
    "bad_words": ["the", "the quick"],
}


KEPT = '{"metadata": {"k": "v"}}'


def job(max_tokens: int, **drawn: object) -> JobRecord:
    return record("fox", max_tokens, {**DRAWN, **drawn})


@pytest.fixture(scope="module")
def at_once(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> str:
    """The digest of a job with the larger limit from the start."""
    run, single = make_run(tmp_path_factory.mktemp("at-once") / "run"), job(LONGER)
    run.add_jobs([single])
    run_all(run, tiny_model, engine="autoregressive")
    assert body(run, single)["usage"]["completion_tokens"] == LONGER
    return digest(run, single)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = make_run(tmp_path / "run")
    run.add_jobs([replace(job(FIRST), kept=KEPT)])
    return run


@pytest.mark.sample(2)
@pytest.mark.parametrize(("engine", "keep_state"), [*((name, True) for name in ENGINES), ("auto", False)])
def test_with_every_engine_also_killed_midway_the_tokens_are_those_of_one_run(
    run: Run, tiny_model: Path, at_once: str, engine: str, keep_state: bool
) -> None:
    run_all(run, tiny_model, engine=engine, keep_state=keep_state, checkpoint="tokens")
    assert any(run.store.list(f"checkpoints/{job(FIRST).job_id}")) == keep_state
    found = extend(run, tiny_model, LONGER)
    assert (len(found.records), found.num_tokens, found.refused) == (1, FIRST, [])
    assert run.jobs() == found.records
    [longer] = found.records
    killed = session(run, tiny_model, engine=engine)
    had = until(killed, longer, FIRST + 20, claimed(run, longer))
    del killed  # without a word
    assert FIRST + 20 <= had < LONGER
    run_all(run, tiny_model, engine=engine)
    assert digest(run, longer) == at_once
    attempts = body(run, longer)["metrics"]["attempts"]
    first, *recovered = [attempt["resume"] and attempt["resume"]["num_recovered_tokens"] for attempt in attempts]
    assert (first, recovered[0]) == (None, FIRST)
    assert FIRST <= recovered[1] <= had


def test_a_kept_state_is_loaded_and_not_computed_again(
    run: Run, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swiftbatch.worker.forward.step_costs.StepCosts.replay_seconds", lambda *_: float("inf"))
    run_all(run, tiny_model, keep_state=True, checkpoint="tokens")
    [longer] = extend(run, tiny_model, LONGER).records
    assert run.store.list(f"checkpoints/{job(FIRST).job_id}") == []
    run_all(run, tiny_model)
    resume = body(run, longer)["metrics"]["attempts"][1]["resume"]
    assert (resume["kind"], resume["num_loaded_positions"] >= FIRST) == ("kv", True)
    assert set(run.store.list("checkpoints")) <= {"workers"}


def test_kept_states_of_layers_are_loaded_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swiftbatch.worker.forward.step_costs.StepCosts.replay_seconds", lambda *_: float("inf"))
    model, longest = save_recurrent_model(tmp_path / "model"), job(170)
    run, single = make_run(tmp_path / "run"), make_run(tmp_path / "at-once")
    run.add_jobs([job(140)])
    single.add_jobs([longest])
    run_all(single, model, engine="autoregressive", checkpoint="tokens")
    run_all(run, model, keep_state=True, checkpoint="tokens")
    [longer] = extend(run, model, 170).records
    run_all(run, model)
    resume = body(run, longer)["metrics"]["attempts"][1]["resume"]
    assert (resume["kind"], resume["num_loaded_positions"]) == ("kv", 64)
    assert digest(run, longer) == digest(single, longest)


def test_the_tokens_are_kept_before_a_result_says_that_the_job_has_ended_and_only_where_it_may_go_on(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, write = make_run(tmp_path / "run"), Run.write_segment
    run.add_jobs([record("fox", 20), record("dog", 20, {"stop": ["a", "e", "i", "o", "u", "t", " "]})])
    kept: dict[str, bool] = {}

    def written(run: Run, name: str, results: ResultSegment) -> None:
        for job_id, *_ in results.index:
            kept.setdefault(job_id.partition("-")[0], job_id in KeptLogs.of(run).sizes())
        write(run, name, results)

    monkeypatch.setattr(Run, "write_segment", written)
    run_all(run, tiny_model)
    reasons = {job.job.custom_id: body(run, job)["choices"][0]["finish_reason"] for job in run.jobs()}
    assert reasons == {"fox": "length", "dog": "stop"}
    assert kept == {"fox": True, "dog": False}


def test_a_second_extend_goes_on_behind_the_first(run: Run, tiny_model: Path, at_once: str) -> None:
    for max_tokens in (FIRST, FIRST + 1, 150, LONGER):
        extend(run, tiny_model, max_tokens)
        run_all(run, tiny_model)
    [newest] = run.jobs()
    assert digest(run, newest) == at_once
    [lineage] = run.lineages()
    assert (lineage[0], lineage[-1], len(lineage)) == (job(FIRST).job_id, newest.job_id, 4)
    assert [line["metadata"] for line in run.joined_lines()] == [{"k": "v"}]
    assert KeptLogs.of(run).sizes().keys() == {newest.job_id}


def test_a_stop_text_across_the_seam_ends_the_job_as_at_once(tmp_path: Path, tiny_model: Path) -> None:
    plain, parted, single = (make_run(tmp_path / name) for name in ("plain", "parted", "single"))
    plain.add_jobs([job(LONGER)])
    run_all(plain, tiny_model)
    token_ids = KeptLogs.of(plain).read(job(LONGER).job_id).token_ids.tolist()
    text = TextCodec(locate_model(str(tiny_model))).decode(token_ids[FIRST - 4 : FIRST + 5]).strip("\ufffd")
    for run, max_tokens in ((parted, FIRST), (single, LONGER)):
        run.add_jobs([job(max_tokens, stop=text, min_tokens=FIRST - 1)])
        run_all(run, tiny_model)
    assert body(parted, parted.jobs()[0])["choices"][0]["finish_reason"] == "length"
    extend(parted, tiny_model, LONGER)
    run_all(parted, tiny_model)
    choices = [body(run, run.jobs()[0])["choices"] for run in (parted, single)]
    assert choices[0] == choices[1]
    assert choices[0][0]["finish_reason"] == "stop"
    assert extend(parted, tiny_model, LONGER + 9).records == []


def test_an_extended_job_keeps_the_rewinds_that_it_had(tmp_path: Path, tiny_model: Path) -> None:
    for first in (30, 45, 60, 75):
        parted = make_run(tmp_path / f"{first}")
        parted.add_jobs([record("fox", first, REWINDING)])
        run_all(parted, tiny_model)
        found = body(parted, parted.jobs()[0])
        if found["choices"][0]["finish_reason"] == "length" and found["metrics"]["num_rewinds"]:
            break
    else:
        pytest.fail("no length ends behind a rewind")
    extend(parted, tiny_model, 150)
    run_all(parted, tiny_model)
    single = make_run(tmp_path / "single")
    single.add_jobs([record("fox", 150, REWINDING)])
    run_all(single, tiny_model)
    ends = [body(run, run.jobs()[0]) for run in (parted, single)]
    assert ends[0]["choices"] == ends[1]["choices"]
    assert ends[0]["metrics"]["num_rewinds"] == ends[1]["metrics"]["num_rewinds"] > 0


def test_an_extended_job_has_the_log_probabilities_of_one_run_or_says_that_they_are_not_kept(
    tmp_path: Path, tiny_model: Path
) -> None:
    parted, single = make_run(tmp_path / "parted"), make_run(tmp_path / "single")
    for run, max_tokens in ((parted, 30), (single, 60)):
        run.add_jobs([job(max_tokens, logprobs=3, min_tokens=0)])
        run_all(run, tiny_model)
    lost = Run.open(str(shutil.copytree(tmp_path / "parted", tmp_path / "lost")))
    assert len(extend(parted, tiny_model, 60).records) == 1
    assert KeptLogs.of(parted).sizes() == {}
    run_all(parted, tiny_model)
    choices = [body(run, run.jobs()[0])["choices"] for run in (parted, single)]
    assert choices[0] == choices[1]
    assert len(choices[0][0]["logprobs"]["tokens"]) == 60
    assert body(parted, parted.jobs()[0])["metrics"]["attempts"][1]["resume"]["num_recovered_tokens"] == 30
    lost.store.delete(f"tokens/{job(30, logprobs=3, min_tokens=0).job_id}.logprobs")
    [(name, reason)] = extend(lost, tiny_model, 60).refused
    assert (name, reason) == ("fox", "the log-probabilities of its tokens are not kept: found no log-probabilities")


def test_choices_are_extended_and_their_line_is_written_anew(tmp_path: Path, tiny_model: Path) -> None:
    def records(max_tokens: int) -> list[JobRecord]:
        sampling = {"seed": 5, "ignore_eos": True}
        line = JobLine("fox", ("the quick brown fox",), None, None, sampling, 3, max_tokens)
        return [JobRecord(job.job_id("f"), job, 1, 5) for job in line.jobs([max_tokens])]

    def line(run: Run) -> list[tuple[int, str]]:
        run.write_output()
        [found] = [json.loads(line) for line in run.store.read("output.jsonl").splitlines()]
        choices = found["response"]["body"]["choices"]
        return [(each["usage"]["completion_tokens"], each["token_ids_sha256"]) for each in choices]

    run, single = make_run(tmp_path / "run"), make_run(tmp_path / "single")
    for each, max_tokens in ((run, FIRST), (single, LONGER)):
        each.add_jobs(records(max_tokens))
        run_all(each, tiny_model)
    shorter = line(run)
    extend(run, tiny_model, LONGER, ["fox"])
    assert line(run) == shorter
    longer = run.jobs()
    assert [record.job.name for record in longer] == ["fox[0]", "fox[1]", "fox[2]"]
    run_to_end(run, tiny_model, longer[1])
    assert line(run) == [shorter[0], line(single)[1], shorter[2]]
    run_all(run, tiny_model)
    assert line(run) == line(single)
