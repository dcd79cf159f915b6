"""The driver on a real Ray: jobs go out, workers are killed, and every result is there once and the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jobs.job import Job, JobRecord
from jobs.run import Progress, Run, RunManifest
from jobs.sampling import SamplingParams
from metrics.counters import DriverCounters
from scheduler.actors import WorkerSpec
from scheduler.backlog import load_queue
from scheduler.cluster import Cluster, connect
from scheduler.driver import Driver, DriverError
from scheduler.fleet import Fleet
from scheduler.heartbeat import RunTakenError, current_progress
from scheduler.job_queue import JobQueue
from worker.config import EngineConfig


class RecordingDisplay:
    """Keeps what the driver shows, and may act on it."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.updates: list[Progress] = []
        self.on_update: Callable[[Progress], None] = lambda progress: None

    def note(self, text: str) -> None:
        self.notes.append(text)

    def update(self, progress: Progress, running: list[tuple[JobRecord, int]], num_tokens_left: int) -> None:
        self.updates.append(progress)
        self.on_update(progress)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        with connect(None, 2) as cluster:
            yield cluster


def make_run(folder: Path, jobs: dict[str, int], seed: int = 7) -> Run:
    """A run with jobs given as custom_id: max_tokens."""
    manifest = RunManifest(
        run_id="run",
        created=time.time(),
        model="counting",
        model_fingerprint="f",
        engine="autoregressive",
        dtype="float32",
        device="cpu",
        num_threads=1,
        seed=seed,
        versions={},
        exactness="not probed",
        cpu_capability="",
    )
    run = Run.create_or_open(str(folder), manifest)
    records = []
    for line_number, (custom_id, max_tokens) in enumerate(jobs.items(), start=1):
        sampling = SamplingParams(max_tokens=max_tokens, seed=seed)
        job = Job(custom_id=custom_id, url="/v1/completions", prompt="count", sampling=sampling)
        records.append(JobRecord(job.job_id("f"), job, line_number, 1))
    run.add_jobs(records)
    return run


def make_driver(
    run: Run,
    cluster: Cluster,
    display: RecordingDisplay,
    *,
    workers: int = 2,
    slots: int = 1,
    attempts: int = 5,
    session: str = "CountingSession",
    counters: DriverCounters | None = None,
) -> Driver:
    spec = WorkerSpec(
        EngineConfig(), run.store.uri, session_factory=f"counting_session:{session}", log_folder=f"{run.store.uri}/logs"
    )
    return Driver(
        run,
        load_queue(run, attempts),
        Fleet(spec, cluster),
        display,
        counters or DriverCounters(),
        num_workers=workers,
        num_slots=slots,
    )


def record(custom_id: str, max_tokens: int, line_number: int = 1) -> JobRecord:
    job = Job(
        custom_id=custom_id, url="/v1/completions", prompt="x", sampling=SamplingParams(max_tokens=max_tokens, seed=1)
    )
    return JobRecord(custom_id, job, line_number, 10)


def test_the_longest_job_is_taken_first_and_equals_in_file_order() -> None:
    queue = JobQueue(max_attempts=5)
    for line_number, (name, max_tokens) in enumerate([("b", 50), ("a", 50), ("long", 200)], start=1):
        queue.add(record(name, max_tokens, line_number))
    taken = [queue.take([], 0.0) for _ in range(4)]
    assert [job.job_id if job else None for job in taken] == ["long", "b", "a", None]


def test_a_lost_job_waits_longer_each_time_and_has_its_attempts() -> None:
    queue = JobQueue(max_attempts=3)
    queue.add(record("a", 100))
    assert queue.take([], 0.0)
    assert queue.lose("a", 100.0)
    assert queue.take([], 100.4) is None
    assert queue.take([], 100.5)
    assert queue.lose("a", 200.0)
    assert queue.take([], 200.9) is None
    assert queue.take([], 201.0)
    assert not queue.lose("a", 300.0)


def test_a_job_that_moves_on_between_losses_is_never_given_up() -> None:
    queue = JobQueue(max_attempts=2)
    queue.add(record("a", 1000), num_generated_tokens=100)
    for num_tokens in range(110, 1000, 10):
        assert queue.take([], 1e9)
        queue.progress("a", num_tokens)
        assert queue.lose("a", 0.0)
    queue.take([], 1e9)
    queue.progress("a", 995)  # less than a hundredth of the job
    assert not queue.lose("a", 0.0)


def test_a_job_lost_twice_without_progress_runs_alone() -> None:
    queue = JobQueue(max_attempts=5)
    queue.add(record("suspect", 500))
    queue.add(record("good", 100))
    taken = []
    for now in (0.0, 10.0):
        taken += [queue.take([], now).job_id, queue.take(["suspect"], now).job_id]
        queue.progress("good", int(now) + 10)
        queue.lose("suspect", now)
        queue.lose("good", now)
    assert taken == ["suspect", "good"] * 2  # one loss alone makes no suspect
    assert queue.take(["other"], 20.0).job_id == "good"  # the longer suspect is passed over beside a neighbour
    assert queue.take([], 20.0).job_id == "suspect"
    queue.add(record("new", 10))
    assert queue.take(["suspect"], 20.0) is None
    queue.progress("suspect", 50)
    assert queue.take(["suspect"], 20.0).job_id == "new"


def job_id(run: Run, custom_id: str) -> str:
    return next(record.job_id for record in run.jobs() if record.job.custom_id == custom_id)


def token_hash(run: Run, custom_id: str) -> str:
    line = run.result(job_id(run, custom_id))
    assert line is not None
    return str(line["response"]["body"]["choices"][0]["token_ids_sha256"])


def result_metrics(run: Run, custom_id: str) -> dict[str, int]:
    line = run.result(job_id(run, custom_id))
    assert line is not None
    return dict(line["response"]["body"]["metrics"])


def test_all_jobs_finish_and_leave_no_checkpoint(tmp_path: Path, cluster: Cluster) -> None:
    run = make_run(tmp_path / "run", {"short": 10, "long": 200, "middle": 100, "tiny": 5})
    display = RecordingDisplay()
    assert make_driver(run, cluster, display).run() == "finished"
    assert run.finished() == {record.job_id for record in run.jobs()}
    progress = display.updates[-1]
    assert progress.jobs == {"pending": 0, "running": 0, "finished": 4, "failed": 0, "cancelled": 0}
    assert progress.num_generated_tokens == 315
    assert not run.store.list("checkpoints")


def test_a_killed_workers_jobs_resume_elsewhere_with_the_same_tokens(tmp_path: Path, cluster: Cluster) -> None:
    jobs = {"a": 300, "b": 300, "c": 60}
    calm = make_run(tmp_path / "calm", jobs)
    make_driver(calm, cluster, RecordingDisplay(), workers=1).run()
    run, display, counters = make_run(tmp_path / "run", jobs), RecordingDisplay(), DriverCounters()
    killed: list[tuple[int, tuple[str, ...]]] = []

    def kill_one(progress: Progress) -> None:
        busy = [worker for worker in progress.workers if worker.jobs]
        if not killed and busy and progress.num_generated_tokens > 100:
            os.kill(busy[0].pid, signal.SIGKILL)
            killed.append((busy[0].pid, busy[0].jobs))

    display.on_update = kill_one
    assert make_driver(run, cluster, display, counters=counters).run() == "finished"
    assert killed
    assert {name: token_hash(run, name) for name in jobs} == {name: token_hash(calm, name) for name in jobs}
    (victim,) = killed[0][1]
    assert result_metrics(run, victim)["num_attempts"] == 2
    assert result_metrics(run, victim)["num_recovered_tokens"] > 0
    assert counters.num_preemptions == {"worker_died": 1}
    assert any(note.startswith("worker w") and "is lost" in note for note in display.notes)
    assert len({worker.id for update in display.updates for worker in update.workers}) == 3


def test_a_failing_job_is_given_up_with_its_reason_and_the_others_finish(tmp_path: Path, cluster: Cluster) -> None:
    run = make_run(tmp_path / "run", {"fails-always": 50, "good": 50})
    counters = DriverCounters()
    state = make_driver(run, cluster, RecordingDisplay(), attempts=2, counters=counters).run()
    assert state == "finished"
    assert run.finished() == {job_id(run, "good")}
    error = run.error(job_id(run, "fails-always"))
    assert error is not None
    assert error["error"]["code"] == "attempts_failed"
    assert "after 2 attempts" in error["error"]["message"]
    assert "it always fails" in error["error"]["message"]
    assert counters.num_preemptions == {"attempt_failed": 2}
    assert counters.jobs_finished == {"failed": 1}


def test_a_job_that_kills_its_workers_takes_no_neighbour_with_it(tmp_path: Path, cluster: Cluster) -> None:
    run = make_run(tmp_path / "run", {"kills-workers": 1000, "a": 900, "b": 30})
    assert make_driver(run, cluster, RecordingDisplay(), workers=1, slots=3, attempts=3).run() == "finished"
    assert run.finished() == {job_id(run, "a"), job_id(run, "b")}
    error = run.error(job_id(run, "kills-workers"))
    assert error is not None
    assert "its process ended" in error["error"]["message"]


def test_a_stopped_driver_says_interrupted_and_the_next_one_goes_on(tmp_path: Path, cluster: Cluster) -> None:
    run, display = make_run(tmp_path / "run", {"a": 400, "b": 20}), RecordingDisplay()
    driver = make_driver(run, cluster, display)
    display.on_update = lambda progress: driver.request_stop() if progress.num_generated_tokens > 100 else None
    assert driver.run() == "interrupted"
    progress = run.progress()
    assert progress is not None
    assert progress.state == "interrupted"
    assert not progress.workers
    assert progress.jobs["running"] == 0
    queue = load_queue(run, 5)
    assert queue.num_generated_tokens > 100  # counted from the token log and the results
    assert make_driver(run, cluster, RecordingDisplay()).run() == "finished"
    assert result_metrics(run, "a")["num_recovered_tokens"] > 0


def test_one_cancelled_job_ends_and_the_others_finish(tmp_path: Path, cluster: Cluster) -> None:
    run, display = make_run(tmp_path / "run", {"endless": 100_000, "waits": 90_000, "good": 50}), RecordingDisplay()

    def cancel(progress: Progress) -> None:
        if progress.num_generated_tokens > 20 and progress.state == "running":
            run.request_cancel(job_id(run, "endless"))
            run.request_cancel(job_id(run, "waits"))

    display.on_update = cancel
    assert make_driver(run, cluster, display, workers=1).run() == "finished"
    assert display.updates[-1].jobs["cancelled"] == 2
    assert run.finished() == {job_id(run, "good")}
    assert run.cancel_requests() == (False, set())


def test_a_cancelled_run_ends_with_every_job_accounted_for(tmp_path: Path, cluster: Cluster) -> None:
    run, display = make_run(tmp_path / "run", {"a": 100_000, "b": 100_000, "c": 100_000}), RecordingDisplay()

    def cancel(progress: Progress) -> None:
        if progress.num_generated_tokens > 20 and progress.state == "running":
            run.request_cancel(None)

    display.on_update = cancel
    assert make_driver(run, cluster, display).run() == "cancelled"
    assert run.failed() == {record.job_id for record in run.jobs()}
    assert run.cancel_requests() == (False, set())


def test_a_result_in_the_store_counts_though_the_report_was_lost(tmp_path: Path, cluster: Cluster) -> None:
    run, display = make_run(tmp_path / "run", {"a": 100_000}), RecordingDisplay()
    other = make_run(tmp_path / "other", {"a": 30})
    make_driver(other, cluster, RecordingDisplay(), workers=1).run()
    late = other.result(job_id(other, "a"))
    assert late is not None

    def finish_behind_its_back(progress: Progress) -> None:
        if progress.num_generated_tokens > 20 and progress.workers:
            run.write_result(job_id(run, "a"), late)
            os.kill(progress.workers[0].pid, signal.SIGKILL)

    display.on_update = finish_behind_its_back
    assert make_driver(run, cluster, display, workers=1).run() == "finished"
    assert display.updates[-1].jobs["finished"] == 1
    assert display.updates[-1].num_generated_tokens == 30


def test_workers_that_never_start_end_the_run_with_the_reason(tmp_path: Path, cluster: Cluster) -> None:
    run = make_run(tmp_path / "run", {"a": 10})
    with pytest.raises(DriverError, match="no worker starts, 3 tries: MemoryError: no room for the model"):
        make_driver(run, cluster, RecordingDisplay(), session="BrokenSession").run()
    assert current_progress(run).state == "interrupted"
    assert current_progress(run).jobs["pending"] == 1
    assert "worker process" in (tmp_path / "run/logs/w1.log").read_text()


def test_a_second_driver_is_refused_while_the_first_is_alive(tmp_path: Path, cluster: Cluster) -> None:
    run, display = make_run(tmp_path / "run", {"a": 300}), RecordingDisplay()
    first = make_driver(run, cluster, display)
    refused: list[Exception] = []

    def try_second(progress: Progress) -> None:
        if progress.state == "running" and progress.workers and not refused:
            with pytest.raises(RunTakenError, match="another driver") as caught:
                make_driver(run, cluster, RecordingDisplay()).run()
            refused.append(caught.value)

    display.on_update = try_second
    assert first.run() == "finished"
    assert refused


def test_a_stale_heartbeat_is_shown_as_interrupted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"a": 300, "b": 300})
    assert current_progress(run).state == "interrupted"  # made, and never run
    beat = current_progress(run).model_copy(
        update={"state": "running", "driver_host": "elsewhere", "updated": time.time() - 3, "driver_pid": 1}
    )
    run.write_progress(beat)
    assert current_progress(run).state == "running"
    run.write_progress(beat.model_copy(update={"updated": time.time() - 20}))
    stale = current_progress(run)
    assert stale.state == "interrupted"
    assert stale.jobs["pending"] == 2


def test_a_dead_driver_of_this_machine_is_noticed_at_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"a": 300})
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)
    beat = current_progress(run).model_copy(
        update={"state": "running", "driver_host": os.uname().nodename, "updated": time.time(), "driver_pid": pid}
    )
    run.write_progress(beat)
    assert current_progress(run).state == "interrupted"
    run.write_progress(beat.model_copy(update={"driver_pid": os.getpid()}))
    assert current_progress(run).state == "running"


def test_the_driver_that_started_later_keeps_the_run(tmp_path: Path, cluster: Cluster) -> None:
    run, display = make_run(tmp_path / "run", {"a": 100_000}), RecordingDisplay()
    once = threading.Event()

    def take_over(progress: Progress) -> None:
        if progress.num_generated_tokens > 20 and not once.is_set():
            once.set()
            later = {"driver_pid": 1, "driver_host": "elsewhere", "started": time.time() + 1}
            run.write_progress(progress.model_copy(update=later))

    display.on_update = take_over
    with pytest.raises(RunTakenError, match="taken over"):
        make_driver(run, cluster, display, workers=1).run()
    after = run.progress()
    assert after is not None
    assert after.driver_host == "elsewhere"


@pytest.mark.slow
def test_the_embedded_ray_lets_no_stranger_in(cluster: Cluster) -> None:
    import ray

    address = ray.get_runtime_context().gcs_address
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    program = f"import ray; ray.init(address={address!r}); print('inside')"
    command = [sys.executable, "-c", program]
    stranger = {"RAY_AUTH_MODE": "disabled"}
    process = subprocess.run(command, env=environment | stranger, capture_output=True, text=True, timeout=300)
    assert process.returncode != 0
    assert "inside" not in process.stdout
    friend = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "inside" in friend.stdout, friend.stderr
