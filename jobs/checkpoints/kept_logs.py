"""Token logs that outlive their jobs, so that these can go on with more tokens some day.

tokens/<job_id>.bin    of a job that ended at its max_tokens; written before its result
"""

from __future__ import annotations

from jobs.checkpoints.token_log import DamagedFileError, TokenLog, decode_log, encode_tokens
from jobs.storage.store import Store

FOLDER = "tokens"
SUFFIX = ".bin"


class KeptLogs:
    """The kept token logs of one run. Methods raise `StoreError` when the storage fails."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def write(self, job_id: str, log: TokenLog) -> None:
        """Keep all that a job has generated, in place of an older log."""
        self._store.write(_path(job_id), encode_tokens(*log))

    def read(self, job_id: str) -> TokenLog:
        """A job's tokens and rewinds. Raises `DamagedFileError`, also where there is no log."""
        data = self._store.read(_path(job_id))
        if data is None:
            raise DamagedFileError("found no token log")
        return decode_log(data)

    def sizes(self) -> dict[str, int]:
        """The jobs that have a log, with its bytes."""
        sizes = self._store.sizes(FOLDER).items()
        return {name.removesuffix(SUFFIX): size for name, size in sizes if name.endswith(SUFFIX) and size is not None}

    def delete(self, job_id: str) -> None:
        """Remove a job's log; an absent one is fine."""
        self._store.delete(_path(job_id))

    def clear(self) -> None:
        """Remove all of them."""
        self._store.delete_folder(FOLDER)


def _path(job_id: str) -> str:
    return f"{FOLDER}/{job_id}{SUFFIX}"
