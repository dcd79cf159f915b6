"""Reads files that may be damaged, or another job's: what can't be used is named in the log, once, and skipped."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from swiftbatch.jobs.checkpoints.checkpoint_records import (
    AttemptRecord,
    ClaimFile,
    FileModel,
    ResumeFile,
    TimelineFile,
    parse_file,
)
from swiftbatch.jobs.file_owner import DamagedFileError, Identity, refuse_other
from swiftbatch.jobs.storage.store import Store

Content = TypeVar("Content")
Decode: TypeAlias = Callable[[bytes], Content]

logger = logging.getLogger(__name__)


def digest(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


class Known(NamedTuple):
    """A file's size in bytes and its checksum, as the manifest has them."""

    size: int
    sha256: str


class CheckedFiles:
    """Files of a store, decoded. The `decode` functions raise `DamagedFileError`; methods raise `StoreError` only."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._named: set[tuple[str, str]] = set()

    def read_verified(
        self, path: str, known: Known, identity: Identity, whose: Decode[Identity | None], decode: Decode[Content]
    ) -> Content | None:
        """Decode a file that the job should have, as `decoded` does; `whose` reads its identity, without a check.

        Another job's file would fail its checksum: the identity is compared first, so that the log can name that job.
        """
        size, sha256 = known

        def verified(data: bytes) -> Content:
            if (owner := whose(data)) is not None:  # else the file is damaged
                refuse_other(owner, identity)
            if len(data) != size:
                raise DamagedFileError(f"found {len(data)} bytes, expected {size}")
            if digest(data) != sha256:
                raise DamagedFileError("found content that does not match its checksum")
            return decode(data)

        return self.decoded(path, self._store.read(path), verified)

    def decoded(self, path: str, data: bytes | None, decode: Decode[Content]) -> Content | None:
        """Decode `data`, which was read from `path`; None where that is absent, damaged or another job's."""
        try:
            if data is None:
                raise DamagedFileError("found no file")
            return decode(data)
        except DamagedFileError as error:
            self.name(path, str(error))
            return None

    def name(self, path: str, problem: str) -> None:
        """Say once what is wrong with a file."""
        if (path, problem) not in self._named:
            self._named.add((path, problem))
            where = self._store.shown_uri
            logger.warning("skipped %s in %s: %s; the job goes on from what is left", path, where, problem)


def read_attempt(
    store: Store, files: CheckedFiles, folder: str, numbers: Sequence[int], index: int, identity: Identity
) -> AttemptRecord:
    """Read what is known of one of a job's attempts, all of which have `numbers`, from its `folder`.

    `files` names what is due and missing, or can't be used.
    """

    def read(name: str, model: type[FileModel], is_due: bool) -> dict[str, Any] | None:
        path = f"{folder}/{name}"
        data = store.read(path)
        if data is None and not is_due:
            return None
        found = files.decoded(path, data, lambda data: parse_file(data, model, identity))
        return found.model_dump(exclude={"identity"}) if found else None

    number, is_newest = numbers[index], index == len(numbers) - 1
    start = read("claim.json", ClaimFile, is_due=True) or {}
    # the first attempt has none, and the newest may have just begun
    resume = read("resume.json", ResumeFile, is_due=index > 0 and not is_newest)
    # none where it drew no token
    timeline = read("timeline.json", TimelineFile, is_due=False)
    known = {"attempt": index + 1} | start | {"number": number, "resume": resume, "timeline": timeline}
    return AttemptRecord.model_validate(known)
