"""The owner of a file. Checkpoints, kept logs and results name it, and serve no other job or run."""

from __future__ import annotations

import re
import struct
from typing import Self

from swiftbatch.jobs.input.validation_errors import shown
from swiftbatch.jobs.json_records import Strict

LENGTH = struct.Struct("<H")  # of the text behind it, in bytes
SAFE = re.compile(r"[A-Za-z0-9_-]+")  # all that ids have


class Identity(Strict):
    """A job, and what beside it decides its tokens.

    `job_id` has a hash of prompt, sampling, seed and model. `fingerprint` is that of the run, see `RunManifest`: runs
    that share it have the same tokens for the same job. The hardware is no part of it, since a job may go on elsewhere.
    """

    job_id: str
    fingerprint: str

    def difference(self, found: Identity) -> str | None:
        """Say why a file with the owner `found` is not this job's; None where it is."""
        if found.job_id != self.job_id:
            return f"found a file of job {_printable(found.job_id)}, expected one of job {self.job_id}"
        if found.fingerprint != self.fingerprint:
            run = "a run with another model, dtype, tokenizer, chat template, logprobs mode or markers of thoughts"
            return f"found a file of {run}, {_printable(found.fingerprint)}, expected {self.fingerprint}"
        return None

    def pack(self) -> bytes:
        """Encode it for the front of a binary file."""
        text = f"{self.job_id} {self.fingerprint}".encode()
        return LENGTH.pack(len(text)) + text

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> tuple[Self, int]:
        """Read what `pack` gave at the front of `data`, and its size in bytes. Raises ValueError for anything else."""
        try:
            (length,) = LENGTH.unpack_from(data)
            text = bytes(data[LENGTH.size : LENGTH.size + length])
            if len(text) < length:
                raise ValueError("torn")
            job_id, fingerprint = text.decode().split(" ")
        except (struct.error, ValueError):
            raise ValueError("found no job's name where one was expected") from None
        return cls(job_id=job_id, fingerprint=fingerprint), LENGTH.size + length


def _printable(text: str) -> str:
    return text if SAFE.fullmatch(text) else shown(text)


class DamagedFileError(ValueError):
    """A file is torn, corrupt or another job's; the text has what was found and expected."""


def refuse_other(found: Identity, expected: Identity) -> None:
    """Raise `DamagedFileError` for another job's file."""
    if (problem := expected.difference(found)) is not None:
        raise DamagedFileError(problem)


def take_identity(payload: bytes | memoryview, expected: Identity) -> int:
    """The size of the identity in front of a payload. Raises `DamagedFileError` for another one than expected."""
    try:
        found, size = Identity.unpack(payload)
    except ValueError as error:
        raise DamagedFileError(str(error)) from None
    refuse_other(found, expected)
    return size
