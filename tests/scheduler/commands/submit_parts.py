from __future__ import annotations

from swiftbatch.scheduler.runs.run_settings import Settings
from swiftbatch.scheduler.runs.submission import Submission, submission


def submit_file(path: str, run_uri: str, is_strict: bool = False, **said: object) -> Submission:
    """`said` names fields of `Computation`."""
    with submission(path, run_uri, Settings(said), is_strict) as submitted:
        return submitted
