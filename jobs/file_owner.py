"""The owner named in checkpoints, kept logs and results."""

from __future__ import annotations

import re
import struct
from typing import Self

from swiftbatch.jobs.json_records import Strict, shown

LENGTH = struct.Struct("<H")  # bytes of the text behind it
SAFE = re.compile(r"[A-Za-z0-9_-]+")  # the characters of ids


class Identity(Strict):
    """A job and the run settings that decide its tokens.

    Runs with the same `fingerprint` (see `RunManifest`) draw the same tokens for a job, on any hardware.
    """

    job_id: str
    fingerprint: str

    def difference(self, found: Identity) -> str | None:
        """Return why `found` is not this owner, or None if both are the same."""
        if found.job_id != self.job_id:
            return f"found a file of job {_printable(found.job_id)}, expected one of job {self.job_id}"
        if found.fingerprint != self.fingerprint:
            run = "a run with another model, dtype, tokenizer, chat template, logprobs mode or markers of thoughts"
            return f"found a file of {run}, {_printable(found.fingerprint)}, expected {self.fingerprint}"
        return None

    def pack(self) -> bytes:
        text = f"{self.job_id} {self.fingerprint}".encode()
        return LENGTH.pack(len(text)) + text

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> tuple[Self, int]:
        """Read an identity from the front of `data`; return it and its number of bytes. Raises ValueError."""
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
    """A torn, corrupt or foreign file."""


def refuse_other(found: Identity, expected: Identity) -> None:
    """Raise `DamagedFileError`."""
    if (problem := expected.difference(found)) is not None:
        raise DamagedFileError(problem)


def take_identity(payload: bytes | memoryview, expected: Identity) -> int:
    """Check a payload's identity; return the identity's number of bytes. Raises `DamagedFileError`."""
    try:
        found, size = Identity.unpack(payload)
    except ValueError as error:
        raise DamagedFileError(str(error)) from None
    refuse_other(found, expected)
    return size
