"""The reasons for which a file is not used: it is damaged, or not this job's."""

from __future__ import annotations

from swiftbatch.jobs.identity import Identity


class DamagedFileError(ValueError):
    """A file is torn, corrupt, another job's, or of a newer version; the text has what was found and expected."""


def refuse_other(found: Identity | None, expected: Identity) -> None:
    """Raise `DamagedFileError` for another job's file; None is one of an older version, which does not say whose."""
    if found is not None and (problem := expected.difference(found)) is not None:
        raise DamagedFileError(problem)


def take_identity(payload: bytes | memoryview, expected: Identity) -> int:
    """The size of the identity in front of a payload. Raises `DamagedFileError` for another one than expected."""
    try:
        found, size = Identity.unpack(payload)
    except ValueError as error:
        raise DamagedFileError(str(error)) from None
    refuse_other(found, expected)
    return size
