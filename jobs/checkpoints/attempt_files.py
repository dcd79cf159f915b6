"""What the small files of one attempt say of it: who claimed it, how it began, when it had how many tokens."""

from __future__ import annotations

from jobs.checkpoints.checked_files import CheckedFiles
from jobs.checkpoints.files import AttemptRecord, ClaimFile, ResumeFile, ResumeRecord, TimelineFile, parse_file
from jobs.checkpoints.timeline import Timeline
from jobs.storage.store import Store


def read_attempt(store: Store, files: CheckedFiles, folder: str, attempt: int, is_newest: bool) -> AttemptRecord:
    """What is known of the attempt in `folder`; `files` names what should be there and is damaged or absent."""
    claim = files.read(f"{folder}/claim.json", lambda data: parse_file(data, ClaimFile))
    # the first attempt has none, and the newest may have just begun
    is_resume_due = attempt > 1 and not is_newest
    return AttemptRecord(
        attempt=attempt,
        **(claim.model_dump(exclude={"version"}) if claim else {}),
        resume=_read_resume(store, files, f"{folder}/resume.json", is_resume_due),
        timeline=_read_timeline(store, files, f"{folder}/timeline.json"),
    )


def _read_resume(store: Store, files: CheckedFiles, path: str, is_due: bool) -> ResumeRecord | None:
    data = store.read(path)
    if data is None and not is_due:
        return None
    found = files.decoded(path, data, lambda data: parse_file(data, ResumeFile))
    return ResumeRecord(**found.model_dump(exclude={"version"})) if found else None


def _read_timeline(store: Store, files: CheckedFiles, path: str) -> Timeline | None:
    data = store.read(path)
    if data is None:  # it drew no token, or an older version wrote none
        return None
    found = files.decoded(path, data, lambda data: parse_file(data, TimelineFile))
    return Timeline(**found.model_dump(exclude={"version"})) if found else None
