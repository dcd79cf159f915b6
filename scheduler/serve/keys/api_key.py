"""A key of a server: whose it is, the hash of its secret, what it may do; and the line that says so in a file."""

from __future__ import annotations

import hashlib
import secrets
from typing import Annotated

from pydantic import Field, ValidationError

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.frozen import Frozen
from swiftbatch.jobs.input.reasons import reasons

PREFIX = "sb_"
NUM_SECRET_BYTES = 32
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
EXPECTED = "expected NAME:sha256:HASH, as `swiftbatch serve --make-key NAME` prints it"

Count = Annotated[int, Field(ge=1)]


class KeyLineError(UserError):
    """A key or its line can't be used. The text shows no hash, and nothing that may be a secret by mistake."""


class Rights(Frozen):
    """The rights of a key; None is no limit."""

    max_running: Count | None = None  # batches at once
    max_unfinished: Count | None = None  # batches, those that wait included
    max_tokens_per_day: Count | None = None  # generated within 24 hours, beyond which no further batch begins
    metrics: bool = False  # True if it reads /metrics and /sd, which tell of all keys' batches


class ApiKey(Frozen):
    """`name` owns the files and batches that are made with the key; `digest` is the secret's SHA-256 in hex."""

    name: Annotated[str, Field(pattern=f"^{NAME}$")]
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    rights: Rights = Rights()


def digest_of(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="surrogateescape")).hexdigest()


def make_key(name: str) -> tuple[str, str]:
    """A new random secret, and the line of its key. Raises KeyLineError for a name that no key can have."""
    secret = PREFIX + secrets.token_urlsafe(NUM_SECRET_BYTES)
    key = parse_line(f"{name}:sha256:{digest_of(secret)}")
    return secret, f"{key.name}:sha256:{key.digest}"


def parse_line(line: str) -> ApiKey:
    """The key that a line tells of: `NAME:sha256:HASH max_running=2 ...`. Raises KeyLineError."""
    who, *words = line.split() or [""]
    name, _, rest = who.partition(":")
    kind, _, digest = rest.partition(":")
    if kind != "sha256":
        raise KeyLineError(f"found no sha256 behind a name, {EXPECTED}")
    try:
        rights = Rights.model_validate(_said(words))
    except ValidationError as error:
        raise KeyLineError(reasons(error, Rights)) from None
    try:
        return ApiKey(name=name, digest=digest, rights=rights)
    except ValidationError as error:
        fault = error.errors()[0]["loc"][0]
        problem = "up to 64 letters, digits, '.', '_' and '-' as its name" if fault == "name" else "64 digits of 0-9a-f"
        raise KeyLineError(f"{fault}: expected {problem}; {EXPECTED}") from None


def _said(words: list[str]) -> dict[str, str]:
    said: dict[str, str] = {}
    for word in words:
        field, equals, value = word.partition("=")
        if not equals or field in said:
            raise KeyLineError(f"expected limits as max_running=2 behind the hash, each once; {EXPECTED}")
        said[field] = value
    return said
