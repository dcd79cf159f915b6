"""What `bench scale` is asked to measure, and where it lies."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from swiftbatch.jobs.frozen import Frozen

JOBS_FILE, RUN, OPTIONS_FILE = "jobs.jsonl", "run", "options.json"


class ScaleOptions(Frozen):
    """A run of `num_jobs`, of which `share_done` are done when it is resumed, and the driver of `num_workers`."""

    num_jobs: int = Field(ge=10)
    num_workers: int = Field(ge=1)
    num_slots: int = Field(ge=1)
    num_seconds: float = Field(gt=0)  # simulated ones, with jobs at work
    share_done: float = Field(default=0.9, ge=0, le=1)
    folder: Path
    json_path: Path | None = None
