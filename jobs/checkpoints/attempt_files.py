"""The small files of one attempt: who claimed it, how it began, and when it had how many tokens."""

from __future__ import annotations

from typing import Any

from swiftbatch.jobs.checkpoints.checked_files import CheckedFiles
from swiftbatch.jobs.checkpoints.files import (
    AttemptRecord,
    ClaimFile,
    FileModel,
    ResumeFile,
    TimelineFile,
    parse_file,
)
from swiftbatch.jobs.identity import Identity
from swiftbatch.jobs.storage.store import Store


def read_attempt(
    store: Store, files: CheckedFiles, folder: str, attempt: int, is_newest: bool, identity: Identity
) -> AttemptRecord:
    """Read what is known of the attempt in `folder`; `files` names what is due and missing, or can't be used."""

    def read(name: str, model: type[FileModel], is_due: bool) -> dict[str, Any] | None:
        path = f"{folder}/{name}"
        data = store.read(path)
        if data is None and not is_due:
            return None
        found = files.decoded(path, data, lambda data: parse_file(data, model, identity))
        return found.model_dump(exclude={"version", "identity"}) if found else None

    claim = read("claim.json", ClaimFile, is_due=True) or {}
    # the first attempt has none, and the newest may have just begun
    resume = read("resume.json", ResumeFile, is_due=attempt > 1 and not is_newest)
    # none where it drew no token, or an older version wrote none
    timeline = read("timeline.json", TimelineFile, is_due=False)
    return AttemptRecord.model_validate({"attempt": attempt, **claim, "resume": resume, "timeline": timeline})
