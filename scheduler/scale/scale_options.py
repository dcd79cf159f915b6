"""Options of `bench scale`, and the files of its folder."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator

from swiftbatch.jobs.frozen import Frozen

JOBS_FILE, RUN, OPTIONS_FILE = "jobs.jsonl", "run", "options.json"
MOST_JOBS, MOST_WORKERS, MOST_SLOTS, MOST_SECONDS = 10_000_000, 100_000, 256, 86_400
MOST_STORE_MS = 10_000


class ScaleOptions(Frozen):
    """A run of `num_jobs`, of which `share_done` are done when it is resumed, and the driver of `num_workers`."""

    num_jobs: int = Field(ge=10, le=MOST_JOBS)
    num_workers: int = Field(ge=1, le=MOST_WORKERS)
    num_slots: int = Field(ge=1, le=MOST_SLOTS)
    num_seconds: float = Field(gt=0, le=MOST_SECONDS)  # simulated ones, with jobs at work
    store_ms: float = Field(default=0.0, ge=0, le=MOST_STORE_MS)  # of a request to the store, simulated; 0: a disk
    share_done: float = Field(default=0.9, ge=0, le=1)
    folder: Path
    json_path: Path | None = None

    @field_validator("json_path")
    @classmethod
    def _in_a_folder(cls, path: Path | None) -> Path | None:
        if path is not None and not path.parent.is_dir():  # else it would be found out when all is measured
            raise ValueError(f"got {path}; expected a file in a folder, and there is none at {path.parent}")
        return path
