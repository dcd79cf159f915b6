from __future__ import annotations

from swiftbatch.jobs.run.run_records import Progress, WorkerStatus

NOW = 1_000_000.0


def make_worker(number: int, *jobs: str, **changes: object) -> WorkerStatus:
    worker = WorkerStatus(id=f"w{number}", host="h", pid=4700 + number, jobs=jobs, tokens_per_second=50.0)
    return worker.model_copy(update=changes)


def make_progress(**changes: object) -> Progress:
    progress = Progress(
        state="running",
        updated=NOW,
        started=NOW - 100,
        jobs={"pending": 1, "running": 2, "finished": 0, "failed": 0, "cancelled": 0},
        running={"story-1": 500, "story-2": 2000},
        max_tokens={"story-1": 2000, "story-2": 2000},
        num_generated_tokens=2500,
        num_tokens_left=3500,
        tokens_per_second=100.0,
        eta_seconds=65.0,
        workers=(make_worker(1, "story-1", "story-2"),),
        driver_host="h",
        driver_pid=2,
    )
    return progress.model_copy(update=changes)
