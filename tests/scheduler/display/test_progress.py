from __future__ import annotations

import io
import json
import os
import pty
import time

import pytest

from swiftbatch.jobs.run.run_records import Progress
from swiftbatch.scheduler.display import event_reference
from swiftbatch.scheduler.display.display import JsonDisplay, LiveDisplay, PlainDisplay, QuietDisplay
from swiftbatch.scheduler.display.events import (
    DriverAwaited,
    JobCancelled,
    JobGivenUp,
    JobPutBack,
    LineRejected,
    RunEnded,
    RunOpened,
    WorkerLost,
    WorkerReady,
)
from swiftbatch.scheduler.display.progress_line import checkpoint_age, harmless, printable, summary_line
from swiftbatch.scheduler.driver.worker_fleet import RATE_SECONDS, Speed
from swiftbatch.scheduler.process.streams import Lines
from tests.scheduler.display.progress_parts import NOW, make_progress, make_worker

OUTPUTS = ("r/output.jsonl", "r/output.parquet")


def test_the_summary_tells_jobs_tokens_speed_and_time_left() -> None:
    assert summary_line(make_progress()) == (
        "running; jobs: 1 pending, 2 running; 2,500 tokens, 100.0 tokens/s, at most 0:01:05 left"
    )
    assert summary_line(make_progress(eta_seconds=None)).endswith("100.0 tokens/s")
    assert summary_line(make_progress(state="finished", jobs={"finished": 3})) == (
        "finished; jobs: 3 finished; 2,500 tokens"
    )
    shared = make_progress(state="finished", jobs={"finished": 3}, num_read_tokens=8000, num_copied_tokens=16_000)
    assert summary_line(shared).endswith("2,500 tokens, 8,000 read and 16,000 shared")


def test_the_summary_tells_acceptance_checkpoints_and_preemptions_once_there_are_some() -> None:
    workers = (make_worker(1, "story-1", last_checkpoint=NOW - 3), make_worker(2, last_checkpoint=NOW - 500))
    progress = make_progress(
        workers=workers,
        mean_acceptance_length=1.804,
        num_preemptions={"worker_died": 2},
        num_resumes={"kv": 1},
        num_tokens_by_draft={"none": 20, "tree": 0, "chain": 60},
    )
    assert summary_line(progress) == (
        "running; jobs: 1 pending, 2 running; 2,500 tokens, 100.0 tokens/s, 1.80 tokens/step (75% in chains), at most "
        "0:01:05 left; checkpoint 3 s ago; 2 preemptions, 1 resume"
    )


def test_the_age_of_checkpoints_is_that_of_the_busy_worker_that_is_most_behind() -> None:
    ages = {"a": 3.0, "b": 8.0}
    busy = [make_worker(1, job, last_checkpoint=NOW - age) for job, age in ages.items()]
    idle = make_worker(3, last_checkpoint=NOW - 900)
    assert checkpoint_age(make_progress(workers=(*busy, idle, make_worker(4, "c")))) == 8.0
    assert checkpoint_age(make_progress(workers=(idle,))) is None
    assert checkpoint_age(make_progress(workers=(make_worker(1, "a", last_checkpoint=NOW + 5),))) == 0.0  # its clock


def test_a_line_comes_every_few_seconds_and_errors_go_their_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    output, errors = io.StringIO(), io.StringIO()
    shown = PlainDisplay(Lines(output), Lines(errors))
    for _ in range(12):
        shown.update(make_progress())
        now[0] += 1.0
    shown.note(WorkerReady("w1", "h", 1))
    shown.note(JobGivenUp("a", "given up"))
    shown.note(JobCancelled("b"))
    shown.update(make_progress(state="finished"))
    shown.update(make_progress(state="finished"))
    lines = output.getvalue().splitlines()
    assert [line.split(";")[0] for line in lines] == ["running"] * 3 + ["worker w1 is ready", "finished", "finished"]
    assert errors.getvalue() == "job a is given up\n"


def test_quiet_shows_errors_and_one_line_at_the_end() -> None:
    output, errors = io.StringIO(), io.StringIO()
    shown = QuietDisplay(Lines(output), Lines(errors))
    shown.update(make_progress())
    shown.note(WorkerLost("w1", "worker_died", "its process ended"))
    shown.note(JobGivenUp("a", "given up after 5 attempts"))
    shown.note(RunEnded("r", "finished", {"finished": 2, "failed": 1}, OUTPUTS))
    assert errors.getvalue() == "job a is given up after 5 attempts\n"
    assert output.getvalue() == (
        "run finished; jobs: 2 finished, 1 failed; to run failed and cancelled jobs again: swiftbatch resume r "
        "--retry-failed; results: r/output.jsonl and r/output.parquet\n"
    )


def test_an_interrupted_run_tells_how_to_go_on() -> None:
    ended = RunEnded("r", "interrupted", {"pending": 2}, OUTPUTS)
    assert str(ended).splitlines() == [
        "run interrupted; jobs: 2 pending",
        "nothing is lost; go on with: swiftbatch resume r",
    ]


def test_objects_carry_kind_time_and_fields() -> None:
    output = io.StringIO()
    shown = JsonDisplay(Lines(output))
    shown.note(JobPutBack("a\nb", "worker_died", 70, is_lost=True))
    shown.update(make_progress())
    shown.update(make_progress())
    first, second = [json.loads(line) for line in output.getvalue().splitlines()]
    assert abs(first.pop("time") - time.time()) < 10
    assert first == {
        "event": "job_put_back",
        "custom_id": "a\nb",
        "reason": "worker_died",
        "num_tokens": 70,
        "is_lost": True,
    }
    del second["event"], second["time"]
    assert Progress.model_validate(second) == make_progress()


def test_many_rejected_lines_are_named_a_few_times_only() -> None:
    texts = [str(LineRejected(n, None, "broken", n, 100)) for n in range(1, 101)]
    assert texts[4] == "rejected line 5: broken"
    assert texts[5] == "and 95 more rejected lines, all in rejects.jsonl"
    assert set(texts[6:]) == {""}


def test_what_a_user_named_can_not_steer_the_terminal() -> None:
    hostile = "\x1b[2J\r\nworker\u202e\ud800\x07 ü 上海"
    assert printable(hostile) == "\\x1b[2J\\r\\nworker\\u202e\\ud800\\x07 ü 上海"
    events = [
        LineRejected(1, hostile, hostile, 1, 1),
        WorkerLost("w1", "worker_died", hostile),
        JobGivenUp(hostile, hostile),
        JobPutBack(hostile, "worker_died", 1, is_lost=True),
        JobPutBack(hostile, "migrated", 1, is_lost=False),
        RunOpened(hostile, "run-1", 3),
        DriverAwaited(hostile),
        *(RunEnded(hostile, state, {"failed": 1}, (hostile, hostile)) for state in ("interrupted", "finished")),
    ]
    assert all(line.isprintable() for event in events for line in str(event).split("\n"))
    assert harmless("a\x1b[2Jb\x9bc\n\td\u200d\u00a0e") == "a\\x1b[2Jb\\x9bc\n\td\u200d\u00a0e"


def test_lines_that_nobody_reads_any_more_are_dropped() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        lines = Lines(stream)
        lines.write("one")
        lines.write("two")


def test_a_terminal_that_is_closed_shows_nothing_more_and_stops_nothing() -> None:
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as stream, LiveDisplay(stream, None) as shown:
        shown.note(WorkerReady("w1", "h", 1))
        shown.update(make_progress())
        os.close(master)
        with pytest.raises(OSError, match="Input/output error"):
            os.write(slave, b"x")
        shown.note(WorkerReady("w2", "h", 1))
        shown.update(make_progress())
        shown.note(WorkerReady("w3", "h", 1))


def test_the_page_about_events_is_as_the_code_says() -> None:
    assert event_reference.PATH.read_text(encoding="utf-8") == event_reference.reference(), (
        "write it again with: python -m swiftbatch.scheduler.display.event_reference"
    )
    assert all(
        kind.__doc__ and "`" + kind.kind() + "`" in event_reference.reference() for kind in event_reference.kinds()
    )


def test_starts_and_replays_before_the_first_token_do_not_count_for_the_speed() -> None:
    speed = Speed(0.0)
    for second in range(1, 101):
        speed.add(0, float(second))
    assert speed.tokens_per_second(100.0) == 0.0
    speed.add(50, 101.0)
    assert speed.tokens_per_second(101.0) == pytest.approx(50.0)


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
