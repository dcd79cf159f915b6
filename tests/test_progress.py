"""What a user sees while a run goes on."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from jobs.job import Job, JobRecord
from jobs.run import Progress, WorkerStatus
from jobs.sampling import SamplingParams
from scheduler import progress as display
from scheduler.heartbeat import RATE_SECONDS, Speed
from scheduler.summary import summary_line


def make_progress(**changes: object) -> Progress:
    progress = Progress(
        state="running",
        updated=time.time(),
        started=time.time(),
        jobs={"pending": 1, "running": 2, "finished": 0, "failed": 0, "cancelled": 0},
        num_generated_tokens=1500,
        tokens_per_second=100.0,
        eta_seconds=65.0,
        workers=(WorkerStatus(id="w1", host="h", pid=1, jobs=("story-1", "story-2")),),
        driver_host="h",
        driver_pid=2,
    )
    return progress.model_copy(update=changes)


def make_record(custom_id: str) -> JobRecord:
    job = Job(custom_id=custom_id, url="/v1/completions", prompt="x", sampling=SamplingParams(max_tokens=2000, seed=1))
    return JobRecord(custom_id, job, 1, 10)


def test_the_summary_tells_jobs_tokens_speed_and_time_left() -> None:
    assert summary_line(make_progress()) == (
        "running; jobs: 1 pending, 2 running; 1,500 tokens, 100.0 tokens/s, at most 0:01:05 left"
    )
    assert summary_line(make_progress(eta_seconds=None)).endswith("100.0 tokens/s")
    assert summary_line(make_progress(state="finished", jobs={"finished": 3})) == (
        "finished; jobs: 3 finished; 1,500 tokens"
    )


def test_without_a_terminal_a_line_comes_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    output = io.StringIO()
    with display.open_display(Console(file=output, width=40)) as shown:
        for _ in range(12):
            shown.update(make_progress(), [], 0)
            now[0] += 1.0
        shown.note("worker [w1] is ready, and this line is much longer than the forty columns")
        shown.update(make_progress(state="finished", eta_seconds=None), [], 0)
    lines = output.getvalue().splitlines()
    assert [line.split(";")[0] for line in lines[:3]] == ["running"] * 3
    assert lines[3:] == [
        "worker [w1] is ready, and this line is much longer than the forty columns",
        summary_line(make_progress(state="finished")),
    ]


def test_a_terminal_gets_a_bar_for_the_run_and_a_line_for_every_running_job() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=110, color_system=None)
    with display.open_display(console) as shown:
        shown.update(make_progress(), [(make_record("story-1"), 500), (make_record("story-[2]"), 2000)], 2500)
        shown.note("worker w1 is lost")
    text = output.getvalue()
    assert "all jobs" in text
    assert "story-1" in text
    assert "500/2,000 w1" in text
    assert "story-[2]" in text
    assert "worker w1 is lost" in text


def test_many_running_jobs_do_not_fill_the_screen() -> None:
    console = Console(file=io.StringIO(), width=110, record=True)
    console.print(display.render(make_progress(), [(make_record(f"j{i}"), 1) for i in range(40)], 1000))
    lines = console.export_text().splitlines()
    assert len(lines) == display.MAX_JOB_LINES + 3
    assert "and 24 more" in lines[-1]


def test_speed_is_that_of_the_last_stretch_not_of_the_whole_run() -> None:
    speed = Speed(0.0)
    assert speed.tokens_per_second(0.0) == 0.0
    for second in range(1, 101):
        speed.add(10, float(second))
    assert speed.tokens_per_second(100.0) == pytest.approx(10.0)
    for second in range(101, 200):
        speed.add(50, float(second))
    assert speed.tokens_per_second(199.0) == pytest.approx(50.0)
    assert speed.tokens_per_second(199.0 + 4 * RATE_SECONDS) < 15.0
