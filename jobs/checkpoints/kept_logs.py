"""Token logs that outlive their jobs, so that these can go on with more tokens some day.

tokens/<job_id>.bin         of a job that ended at its max_tokens, or in a thought that there was no room to close;
                            written before its result
tokens/<job_id>.logprobs    the log-probabilities of these tokens, where the job asked for them; written before both
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from swiftbatch.jobs.checkpoints.logprob_files import decode_span, encode_span
from swiftbatch.jobs.checkpoints.token_log import TokenLog, decode_log, encode_log
from swiftbatch.jobs.file_owner import DamagedFileError, Identity
from swiftbatch.jobs.logprobs import TokenLogprobs
from swiftbatch.jobs.storage.store import Store

if TYPE_CHECKING:
    from swiftbatch.jobs.run.run import Run

FOLDER = "tokens"
SUFFIX, LOGPROBS = ".bin", ".logprobs"


class KeptLogs:
    """The kept token logs of one run. Methods raise `StoreError` when the storage fails."""

    def __init__(self, store: Store, fingerprint: str) -> None:
        """`fingerprint` is the run's, see `RunManifest`."""
        self._store = store
        self._fingerprint = fingerprint

    @classmethod
    def of(cls, run: Run) -> Self:
        return cls(run.store, run.manifest.fingerprint)

    def write(self, job_id: str, log: TokenLog, logprobs: TokenLogprobs | None = None) -> None:
        """Keep all that a job has generated, in place of an older log."""
        identity = self._identity(job_id)
        if logprobs is not None:
            self._store.write(_path(job_id, LOGPROBS), encode_span(log.token_ids, logprobs, identity))
        self._store.write(_path(job_id), encode_log(log, identity))

    def read(self, job_id: str) -> TokenLog:
        """A job's tokens and rewinds. Raises `DamagedFileError`, also where there is no log or another job's."""
        data = self._store.read(_path(job_id))
        if data is None:
            raise DamagedFileError("found no token log")
        return decode_log(data, self._identity(job_id))

    def read_logprobs(self, job_id: str, log: TokenLog) -> TokenLogprobs:
        """The log-probabilities of all tokens of a kept log. Raises `DamagedFileError`, also if some have none."""
        data = self._store.read(_path(job_id, LOGPROBS))
        if data is None:
            raise DamagedFileError("found no log-probabilities")
        span = decode_span(data, self._identity(job_id))
        if span.num_agreeing(log.token_ids) < len(log.token_ids):
            raise DamagedFileError("found log-probabilities of other tokens")
        return span.logprobs

    def sizes(self) -> dict[str, int]:
        """The jobs that have a log, with its bytes and those of log-probabilities."""
        found = {name: size for name, size in self._store.sizes(FOLDER).items() if size is not None}
        names = (name.removesuffix(SUFFIX) for name in found if name.endswith(SUFFIX))
        return {name: found[f"{name}{SUFFIX}"] + found.get(f"{name}{LOGPROBS}", 0) for name in names}

    def delete(self, job_id: str) -> None:
        """Remove a job's log; an absent one is fine."""
        for suffix in (SUFFIX, LOGPROBS):
            self._store.delete(_path(job_id, suffix))

    def clear(self) -> None:
        """Remove all of them."""
        self._store.delete_folder(FOLDER)

    def _identity(self, job_id: str) -> Identity:
        return Identity(job_id=job_id, fingerprint=self._fingerprint)


def _path(job_id: str, suffix: str = SUFFIX) -> str:
    return f"{FOLDER}/{job_id}{suffix}"
