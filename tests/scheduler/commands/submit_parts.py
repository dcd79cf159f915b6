"""A submitted job file, whose run nobody holds any more."""

from __future__ import annotations

from scheduler.runs.settings import Settings
from scheduler.runs.submission import Submission, submission


def submit_file(path: str, run_uri: str, settings: Settings, is_strict: bool = False) -> Submission:
    with submission(path, run_uri, settings, is_strict) as submitted:
        return submitted
