"""Checkpoints of running jobs: a token log, which is the truth, and a state, which saves work.

Each attempt has its own folder, and a job ends with none:

checkpoints/<job_id>/<attempt>/claim.json            who took the job
                               tokens.bin            all tokens so far, replaced as a whole
                               state-<num_tokens>.arrow
                               manifest.json         names the state and its checksum, written last
"""

from __future__ import annotations

import hashlib
import logging
import time
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jobs.json_lines import dump_line
from jobs.reasons import reasons
from jobs.state_file import State, decode_state, encode_state
from jobs.store import Store
from jobs.token_log import DamagedFileError, TokenIds, decode_tokens, encode_tokens

__all__ = ["CheckpointStore", "State", "TokenIds"]

logger = logging.getLogger(__name__)


class StateManifest(BaseModel):
    """What `manifest.json` says: `size` in bytes, `num_tokens` generated tokens that the state has seen."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    version: Literal[1] = 1
    num_tokens: int = Field(ge=0)
    file: str
    size: int = Field(ge=0)
    sha256: str


class CheckpointStore:
    """The checkpoints of one run. Methods raise `StoreError` when the storage fails; damaged files are skipped.

    An attempt writes below its own number only, so a worker believed dead can't harm its successor's files.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def claim(self, job_id: str, worker_id: str) -> int:
        """Open the next attempt (1, 2, ...) of a job and return its number."""
        attempt = self.attempts(job_id) + 1
        claim = dump_line({"version": 1, "worker_id": worker_id, "claimed": time.time()})
        while not self._store.write_new(_path(job_id, attempt, "claim.json"), claim):
            attempt += 1
        return attempt

    def attempts(self, job_id: str) -> int:
        """The number of the newest attempt, 0 before the first."""
        return max(self._attempts(job_id), default=0)

    def write_tokens(self, job_id: str, attempt: int, token_ids: TokenIds) -> int:
        """Replace the attempt's log by `token_ids` [num_tokens], all tokens generated so far. Returns bytes written."""
        data = encode_tokens(token_ids)
        self._store.write(_path(job_id, attempt, "tokens.bin"), data)
        return len(data)

    def read_tokens(self, job_id: str) -> TokenIds:
        """The longest log [num_tokens] of all attempts, empty if there is none; a damaged one is named in a warning."""
        longest = np.zeros(0, dtype=np.uint32)
        for attempt in self._attempts(job_id):
            path = _path(job_id, attempt, "tokens.bin")
            data = self._store.read(path)
            if data is None:
                continue
            try:
                token_ids = decode_tokens(data)
            except DamagedFileError as error:
                self._warn(path, str(error))
                continue
            if len(token_ids) > len(longest):
                longest = token_ids
        return longest

    def write_state(self, job_id: str, attempt: int, num_tokens: int, state: State) -> int:
        """Keep the state after `num_tokens` generated tokens, in place of the attempt's older one.

        Returns bytes written. Raises `TypeError` for an array that is no plain numbers.
        """
        data = encode_state(state)
        name = _state_name(num_tokens)
        digest = hashlib.sha256(data).hexdigest()
        manifest = StateManifest(num_tokens=num_tokens, file=name, size=len(data), sha256=digest)
        self._store.write(_path(job_id, attempt, name), data)
        self._store.write(_path(job_id, attempt, "manifest.json"), manifest.model_dump_json().encode() + b"\n")
        for other in self._store.list(_folder(job_id, attempt)):
            if other.startswith("state-") and other != name:
                self._store.delete(_path(job_id, attempt, other))
        return len(data)

    def read_state(self, job_id: str) -> tuple[int, State] | None:
        """The state furthest on over all attempts, with its number of generated tokens; None if none is whole.

        It may be ahead of the token log or behind it: the log decides. A damaged file is named in a warning.
        """
        manifests = [(attempt, self._manifest(job_id, attempt)) for attempt in self._attempts(job_id)]
        found = [(manifest.num_tokens, attempt, manifest) for attempt, manifest in manifests if manifest is not None]
        for num_tokens, attempt, manifest in sorted(found, key=lambda entry: entry[:2], reverse=True):
            path = _path(job_id, attempt, _state_name(num_tokens))
            try:
                return num_tokens, decode_state(_verified(self._store.read(path), manifest))
            except DamagedFileError as error:
                self._warn(path, str(error))
        return None

    def clear(self, job_id: str) -> None:
        """Remove all checkpoints of a job; call it when the result is written."""
        self._store.delete_folder(f"checkpoints/{job_id}")

    def _attempts(self, job_id: str) -> list[int]:
        return sorted(int(name) for name in self._store.list(f"checkpoints/{job_id}") if name.isdecimal())

    def _manifest(self, job_id: str, attempt: int) -> StateManifest | None:
        path = _path(job_id, attempt, "manifest.json")
        data = self._store.read(path)
        if data is None:
            return None
        try:
            manifest = StateManifest.model_validate_json(data)
        except ValidationError as error:
            self._warn(path, reasons(error, StateManifest))
            return None
        return manifest

    def _warn(self, path: str, problem: str) -> None:
        logger.warning("skipped %s in %s: %s; the job goes on from what is left", path, self._store.shown_uri, problem)


def _verified(data: bytes | None, manifest: StateManifest) -> bytes:
    if manifest.file != _state_name(manifest.num_tokens):
        raise DamagedFileError("found another file name in the manifest than its number of tokens gives")
    if data is None:
        raise DamagedFileError("found no file, expected the one that the manifest names")
    if len(data) != manifest.size:
        raise DamagedFileError(f"found {len(data)} bytes, expected {manifest.size}")
    if hashlib.sha256(data).hexdigest() != manifest.sha256:
        raise DamagedFileError("found content that does not match its checksum")
    return data


def _folder(job_id: str, attempt: int) -> str:
    return f"checkpoints/{job_id}/{attempt:04d}"


def _path(job_id: str, attempt: int, name: str) -> str:
    return f"{_folder(job_id, attempt)}/{name}"


def _state_name(num_tokens: int) -> str:
    return f"state-{num_tokens}.arrow"
