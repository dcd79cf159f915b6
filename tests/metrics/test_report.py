from __future__ import annotations

import gc
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.input.rejects import Reject
from swiftbatch.jobs.job import Job, JobRecord, Message
from swiftbatch.jobs.run.output_line import Reasoning, error_line, success_line
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import DriverClaim, WorkerStatus
from swiftbatch.jobs.sampling_params import RepetitionDetection, SamplingParams
from swiftbatch.metrics.report.attempts import job_pace, rows_of
from swiftbatch.metrics.report.charts import acceptance_by_length, gantt, ms_per_token_by_length, throughput
from swiftbatch.metrics.report.page import render, summary
from swiftbatch.metrics.report.page_text import clock, ticks
from swiftbatch.metrics.report.run_facts import EXCERPT_CHARACTERS, MAX_JOBS, gather
from tests.jobs.checkpoints.checkpoint_parts import claim
from tests.jobs.run.run_parts import PROGRESS, write_result
from tests.metrics.report_parts import (
    BEGIN,
    ENDED,
    attempt,
    facts_of,
    finish,
    new_run,
    page_of,
    preempted_run,
    record,
    timeline,
)
from tests.work_counts import counted_calls

pytestmark = pytest.mark.long


def test_the_curves_say_what_the_timelines_say(tmp_path: Path) -> None:
    found = facts_of(preempted_run(str(tmp_path))).tally.stretches()
    speed = throughput(found, BEGIN, BEGIN + 100)
    assert (speed.tokens_per_second * np.diff(speed.edges)).sum() == pytest.approx(400 + 640 + 500 + 500)
    middle = speed.tokens_per_second[(speed.edges[:-1] > 4) & (speed.edges[1:] < 40)]
    assert middle == pytest.approx(10 + 500 / 49, rel=0.01)
    assert speed.tokens_per_second[(speed.edges[:-1] > 51) & (speed.edges[1:] < 52)].sum() == 0
    acceptance = acceptance_by_length(found)
    assert acceptance.mean == pytest.approx(3.0)
    assert 100 < acceptance.length.min() < acceptance.length.max() < 1100
    pace = ms_per_token_by_length(found)
    assert 50 < pace.mean.min() < pace.mean.max() < 110


def test_a_long_jobs_pace_is_told_length_by_length(tmp_path: Path) -> None:
    run, job = new_run(str(tmp_path)), record("long", max_tokens=10_000)
    run.add_jobs([job])
    kept = timeline(BEGIN, 300.0, 0, 10_000, num_marks=61)
    slower = kept.model_copy(update={"seconds": tuple(300 * (i / 60) ** 2 for i in range(61))})
    finish(run, job, [attempt(1, "w1", BEGIN, slower)], BEGIN + 300)
    pace = ms_per_token_by_length(facts_of(run).tally.stretches())
    assert (np.diff(pace.mean) > 0).all()
    assert pace.mean[-1] > 5 * pace.mean[0]
    assert (pace.low <= pace.mean).all()
    assert (pace.mean <= pace.high).all()
    acceptance, mean = job_pace(facts_of(run).jobs[0])
    assert acceptance == pytest.approx(3.0, abs=0.01)
    assert mean == pytest.approx(30.0)


def test_the_plan_shows_who_had_what_when_and_how_it_ended(tmp_path: Path) -> None:
    plan = gantt(facts_of(preempted_run(str(tmp_path))), BEGIN, BEGIN + 100)
    assert [row.name for row in plan.rows] == ["w1", "w2", "w3"]
    [[lost]], [[released]], lanes = (row.lanes for row in plan.rows)
    assert (lost.outcome, lost.left, lost.width) == ("lost", 0, pytest.approx(42))
    assert lost.wait == pytest.approx(100 * 2 / 42, abs=0.1)
    assert (released.outcome, released.width) == ("released", pytest.approx(50))
    assert [[(bar.outcome, bar.is_resume, bar.left) for bar in lane] for lane in lanes] == [
        [("finished", True, pytest.approx(50))],
        [("finished", True, pytest.approx(51))],
    ]
    assert lanes[0][0].wait == pytest.approx(20.0)
    assert "resumed (kv) in 1.5 s with 360 tokens, 40 drawn again; finished" in lanes[0][0].text


def test_bars_of_a_lane_never_overlap_and_stay_inside(tmp_path: Path) -> None:
    run = new_run(str(tmp_path))
    jobs = [record(f"j{i}") for i in range(40)]
    run.add_jobs(jobs)
    for i, job in enumerate(jobs):
        start = BEGIN + 7 * (i % 13)
        finish(run, job, [attempt(1, f"w{i % 2}", start, timeline(start, 10.0, 0, 1000))], start + 10)
    plan = gantt(facts_of(run), BEGIN, BEGIN + 94)
    assert sum(len(lane) for row in plan.rows for lane in row.lanes) == 40
    for lane in (lane for row in plan.rows for lane in row.lanes):
        ends = [bar.left + bar.width for bar in lane]
        assert all(bar.left >= end - 0.01 for bar, end in zip(lane[1:], ends, strict=False))
        assert max(ends) <= 100.01


def test_an_attempt_that_drew_no_known_token_ends_where_it_began(tmp_path: Path) -> None:
    run, job = preempted_run(str(tmp_path)), record("unlucky")
    run.add_jobs([job])
    attempts = [attempt(1, "w1", BEGIN + 5), attempt(2, "w2", BEGIN + 80, timeline(BEGIN + 81, 9.0, 0, 1000))]
    finish(run, job, attempts, BEGIN + 90)
    first, second = facts_of(run).jobs[2].attempts
    assert (first.outcome, first.end) == ("lost", BEGIN + 5)
    assert (second.outcome, second.end) == ("finished", BEGIN + 90)


def test_workers_of_a_second_driver_have_rows_of_their_own(tmp_path: Path) -> None:
    run = preempted_run(str(tmp_path))
    drivers = [
        DriverClaim(host="h", pid=number, driver_id=f"{number}", started=BEGIN + moment)
        for number, moment in enumerate((-1, 49), 1)
    ]
    facts = gather(run, ENDED, drivers)
    names = [row.name for row in gantt(facts, BEGIN, BEGIN + 100).rows]
    assert names == ["w1 of driver 1", "w2 of driver 1", "w3 of driver 2"]


def test_unfinished_jobs_are_shown_from_their_checkpoints(tmp_path: Path) -> None:
    run = new_run(str(tmp_path))
    busy, waiting, failed, cancelled, fresh = jobs = [
        record(name) for name in ("busy", "waiting", "bad", "gone", "new")
    ]
    run.add_jobs(jobs)
    checkpoints, now = CheckpointStore.of(run), time.time()
    for job, is_released in ((busy, False), (waiting, True), (failed, False), (cancelled, False)):
        number = claim(checkpoints, job.job_id, "w1")
        checkpoints.write_tokens(job.job_id, number, np.arange(30, dtype=np.uint32))
        checkpoints.write_timeline(job.job_id, number, timeline(now, 5.0, 0, 30, is_released))
    run.write_error(failed.job_id, error_line(failed, "attempts_failed", "given up after 1 attempts; no room"))
    run.write_error(cancelled.job_id, error_line(cancelled, "cancelled", "cancelled by its user"))
    worker = WorkerStatus(id="w1", host="h", pid=1, jobs=("busy",))
    progress = PROGRESS.model_copy(update={"workers": (worker,), "running": {"busy": 70}, "updated": now + 9})
    facts = facts_of(run, progress)
    assert [job.state for job in facts.jobs] == ["running", "pending", "failed", "cancelled", "pending"]
    assert [job.num_tokens for job in facts.jobs] == [70, 30, 30, 30, 0]
    outcomes = [[attempt.outcome for attempt in job.attempts] for job in facts.jobs]
    assert outcomes == [["running"], ["released"], ["lost"], ["cancelled"], []]
    assert facts.jobs[0].attempts[0].end == now + 9
    page = render(facts, run.store, "/")
    assert "given up after 1 attempts; no room" in page
    assert "70 <small>of 1,000</small>" in page
    assert fresh.job.custom_id in page


def test_the_summary_counts_the_whole_run(tmp_path: Path) -> None:
    run = preempted_run(str(tmp_path))
    run.write_rejects([Reject(3, "odd", "unknown field"), Reject(9, None, "not JSON")])
    facts = facts_of(run)
    figures = {figure.name: figure for figure in summary(facts, facts.tally.stretches(), BEGIN, BEGIN + 100)}
    assert figures["jobs finished"].value == "2 of 2"
    assert figures["tokens generated"].value == "2,000"
    assert figures["on average, in 1:40"].value == "20 tokens/s"
    assert figures["mean acceptance length"].value == "3.00"
    assert figures["mean acceptance length"].detail == "tokens per drafted step, 25% by chains, 75% by plain steps"
    assert figures["preemptions"].value == "2"
    assert figures["preemptions"].detail == "1 lost, 1 handed back; 860 tokens recovered, 40 drawn again"
    assert (figures["dead-letters"].value, figures["dead-letters"].detail) == ("0", "2 lines of the job file rejected")
    assert figures["dead-letters"].tone == ""  # no job failed
    page = page_of(run)
    assert all(reason in page for reason in ("unknown field", "not JSON"))


def test_a_run_of_less_than_a_second_has_the_same_speed_in_figure_and_chart(tmp_path: Path) -> None:
    run, job = new_run(str(tmp_path)), record("brief")
    run.add_jobs([job])
    finish(run, job, [attempt(1, "w1", BEGIN, timeline(BEGIN, 0.5, 0, 1000))], BEGIN)
    facts = facts_of(run)
    found = facts.tally.stretches()
    [figure] = [each for each in summary(facts, found, BEGIN, BEGIN + 0.5) if each.link == "#speed"]
    assert (figure.name, figure.value) == ("on average, in 0.5 s", "2,000 tokens/s")
    assert throughput(found, BEGIN, BEGIN + 0.5).tokens_per_second == pytest.approx([2000.0])


def test_hours_in_which_nothing_ran_do_not_count_for_the_speed(tmp_path: Path) -> None:
    run, jobs = new_run(str(tmp_path)), [record("evening"), record("morning")]
    run.add_jobs(jobs)
    for job, start in zip(jobs, (BEGIN, BEGIN + 8 * 3600), strict=True):
        finish(run, job, [attempt(1, "w1", start, timeline(start, 100.0, 0, 1000))], start + 100)
    facts = facts_of(run)
    [speed] = [
        figure
        for figure in summary(facts, facts.tally.stretches(), BEGIN, BEGIN + 8 * 3600 + 100)
        if figure.link == "#speed"
    ]
    assert speed.value == "10 tokens/s"
    assert speed.detail == "1 worker, 7:58:20 without a job not counted"


def test_a_run_that_has_not_begun_has_a_page_without_curves(tmp_path: Path) -> None:
    run = new_run(str(tmp_path))
    empty = page_of(run)
    run.add_jobs([record("a")])
    page = page_of(run)
    for text in (empty, page):
        assert "<svg" not in text
        assert "No job has begun." in text
        assert "No tokens yet." in text


def test_of_long_texts_the_beginning_is_shown(tmp_path: Path) -> None:
    run, jobs = new_run(str(tmp_path)), [record("short", "Tell."), record("long", "Tell of Ahab. " * 100)]
    run.add_jobs(jobs)
    for job, text in zip(jobs, ("Call me Ishmael.", "Call me Ishmael. " * 5000), strict=True):
        finish(run, job, [attempt(1, "w1", BEGIN, timeline(BEGIN, 9.0, 0, 1000))], BEGIN + 9, text)
    page = page_of(run)
    assert "<bdi>Call me Ishmael.</bdi>" in page
    assert page.count("Call me Ishmael.") == 1 + EXCERPT_CHARACTERS // 17
    assert page.count("…</bdi>") == 2


def test_thoughts_that_were_cut_are_counted_with_the_command_that_goes_on(tmp_path: Path) -> None:
    run = new_run(str(tmp_path / "run"))
    messages = (Message(role="user", content="Why?"),)
    closing, stopping = (
        RepetitionDetection(max_pattern_size=2, min_count=9, action=action) for action in ("close", "stop")
    )
    ends = [("length", "", None), ("length", "So", None), ("stop", "", None)]
    loops = [("repetition", "", closing), ("repetition", "So", closing), ("repetition", "", stopping)]
    for number, (reason, content, detection) in enumerate([*ends, *loops]):
        sampling = SamplingParams(max_tokens=300, seed=1, repetition_detection=detection)
        job = Job(custom_id=f"j{number}", url="/v1/chat/completions", messages=messages, sampling=sampling)
        chat = JobRecord(job.job_id("f1"), job, number, 5)
        run.add_jobs([chat])
        line = success_line(
            *(chat, "run-1", f"hm{content}", reason),
            model="embedded",
            system_fingerprint=run.manifest.fingerprint,
            token_ids=np.zeros(300, np.uint32),
            metrics={},
            reasoning=Reasoning("hm", content, 2),
        )
        assert write_result(run, chat.job_id, line)
    page = page_of(run)
    assert "with an empty answer: 2." in page
    assert f"swiftbatch extend {run.store.shown_uri} --max-tokens 600" in page
    assert "empty answer" not in page_of(preempted_run(str(tmp_path / "other")))


def test_plain_decoding_has_no_acceptance_curve(tmp_path: Path) -> None:
    run, job = new_run(str(tmp_path)), record("plain")
    run.add_jobs([job])
    zeros = dict.fromkeys(("num_drafts", "num_accepted_tokens"), (0,) * 11)
    kept = timeline(BEGIN, 10.0, 0, 1000).model_copy(update=zeros)
    finish(run, job, [attempt(1, "w1", BEGIN, kept)], BEGIN + 10)
    page = page_of(run)
    assert page.count("<svg ") == 2
    assert "Nothing was drafted." in page


def run_of_many(folder: Path, num_jobs: int, num_marks: int = 64) -> Run:
    run = new_run(str(folder))
    jobs = [record(f"story-{i}", "Once upon a time " * 40) for i in range(num_jobs)]
    run.add_jobs(jobs)
    for i, job in enumerate(jobs):
        start = BEGIN + 10 * (i // 8)
        first = attempt(1, f"w{i % 4}", start, timeline(start + 1, 30.0, 0, 600, num_marks=num_marks))
        second = attempt(2, f"w{i % 5}", start + 40, timeline(start + 41, 30.0, 600, 1000, num_marks=num_marks))
        finish(run, job, [first, second] if i % 3 == 0 else [first], start + 80, "It was a dark night. " * 250)
    return run


def test_a_job_on_the_page_is_as_much_work_among_many_as_among_few(tmp_path: Path) -> None:
    num_calls = []
    page_of(preempted_run(str(tmp_path / "small")))  # what is loaded once
    for num_jobs in (30, 150):
        run = run_of_many(tmp_path / str(num_jobs), num_jobs)
        with counted_calls() as work:
            page_of(run)
        num_calls.append(work.num_calls)
    few, many = num_calls
    assert many < 5 * 1.2 * few


def test_500_jobs_take_less_than_two_megabytes(tmp_path: Path) -> None:
    """Measured with a tenth and a fifth of them, because each job adds as much."""
    tenth, fifth = (page_of(run_of_many(tmp_path / str(num_jobs), num_jobs)) for num_jobs in (50, 100))
    assert len(fifth) + 8 * (len(fifth) - len(tenth)) < 2_000_000
    assert [page.count('class="bar ') for page in (tenth, fifth)] == [67, 134]


def test_a_job_that_no_page_lists_leaves_its_numbers_alone_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run may have a million jobs with long prompts."""
    monkeypatch.setattr("swiftbatch.metrics.report.run_facts.MAX_JOBS", 5)
    monkeypatch.setattr("swiftbatch.metrics.report.run_facts.MAX_BARS", 5)
    run = run_of_many(tmp_path, 200, num_marks=7)
    facts_of(run)  # what is loaded once
    gc.collect()
    tracemalloc.start()
    try:
        facts = facts_of(run)
        gc.collect()  # live data without garbage
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes < 800 * facts.tally.num_jobs
    assert [bool(job.prompt and job.excerpt) for job in facts.jobs] == [True] * 5


def test_among_very_many_jobs_each_attempt_has_fewer_stretches_of_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of_many(tmp_path, 3)
    whole = facts_of(run).tally.stretches()
    monkeypatch.setattr("swiftbatch.metrics.report.run_facts.MAX_INTERVALS", 30)
    facts = facts_of(run)
    few = facts.tally.stretches()
    num_attempts = len(facts.tally.starts)
    assert (len(whole.start), len(few.start)) == (63 * num_attempts, 10 * num_attempts)
    for name in ("num_tokens", "num_drafts", "num_accepted_tokens"):
        assert getattr(few, name).sum() == getattr(whole, name).sum()
    assert few.end.max() == whole.end.max()
    assert rows_of(facts.jobs[0], 1)[0][:2] == (whole.start[0], facts.jobs[0].attempts[0].end)


def test_of_too_many_jobs_those_without_a_result_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(str(tmp_path))
    jobs = [record(f"story-{i}") for i in range(9)]
    run.add_jobs(jobs)
    for job in jobs[:8]:
        finish(run, job, [attempt(1, "w1", BEGIN, timeline(BEGIN, 10.0, 0, 1000))], BEGIN + 10)
    run.write_error(jobs[8].job_id, error_line(jobs[8], "attempts_failed", "given up"))
    assert MAX_JOBS >= 500
    monkeypatch.setattr("swiftbatch.metrics.report.run_facts.MAX_JOBS", 3)
    monkeypatch.setattr("swiftbatch.metrics.report.run_facts.MAX_BARS", 5)
    page = page_of(run)
    assert [f'id="job-{number}"' in page for number in (1, 2, 3, 9)] == [True, True, False, True]
    assert "3 of 9 are listed" in page
    assert "The 3 shortest attempts are left out." in page


def test_the_first_jobs_are_listed_also_those_whose_lost_attempt_left_no_timeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, jobs = new_run(str(tmp_path)), [record(f"job-{number}") for number in range(4)]
    run.add_jobs(jobs)
    for job in jobs:
        lost = [attempt(1, "w1", BEGIN)] if job is jobs[0] else []
        finish(run, job, [*lost, attempt(2, "w2", BEGIN + 5, timeline(BEGIN + 5, 5.0, 0, 1000))], BEGIN + 10)
    monkeypatch.setattr("swiftbatch.metrics.report.run_facts.MAX_JOBS", 2)
    assert [job.number for job in facts_of(run).jobs] == [1, 2]


@pytest.mark.parametrize(
    ("seconds", "labels"),
    [
        (7.0, ["0:00", "0:02", "0:04", "0:06"]),
        (100.0, ["0:00", "0:30", "1:00", "1:30"]),
        (3 * 3600.0, ["0:00", "1:00:00", "2:00:00", "3:00:00"]),
        (0.0, ["0:00"]),
    ],
)
def test_time_axes_have_few_round_ticks(seconds: float, labels: list[str]) -> None:
    assert [label for _, label in ticks(seconds, 5)] == labels
    assert clock(2 * 86_400 + 3 * 3600 + 240) == "2d 03:04"
    assert clock(3599.6) == "1:00:00"
