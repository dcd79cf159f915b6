"""The connection to an object store: what its URI and the environment say, with pyarrow's own patience cut short."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 10.0  # for which a server may send or take nothing
S3_TRIES = 1  # pyarrow's own; more of them hide the error, and don't work for small objects
GCS_RETRY_SECONDS = 5

ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
# a checksum behind the body: S3 servers other than Amazon's often don't know it
CHECKSUMS = "AWS_REQUEST_CHECKSUM_CALCULATION"

# pyarrow's words for errors that no second try can change; all others may pass
NO_BUCKET = ("AWS Error NO_SUCH_BUCKET", "' not found")
GONE = ("AWS Error NO_SUCH_KEY", "(HTTP status 404)", "Status(NOT_FOUND")
REFUSED = (
    "AWS Error ACCESS_DENIED",
    "AWS Error SIGNATURE_DOES_NOT_MATCH",
    "AWS Error INVALID_ACCESS_KEY_ID",
    "(HTTP status 301)",
    "(HTTP status 400)",
    "(HTTP status 401)",
    "(HTTP status 403)",
    "Status(PERMISSION_DENIED",
    "Status(UNAUTHENTICATED",
)


class Place(NamedTuple):
    """A `pyarrow.fs.FileSystem` for objects of one request, one for those of several parts, and bucket with prefix."""

    filesystem: Any
    multipart: Any
    root: str


def open_place(uri: str) -> Place:
    """The place that an `s3://` or `gs://` URI names. May ask the store for the bucket's region.

    The filesystems try a failed request again hardly (on GCS) or not at all. Raises `ValueError` or `OSError`.
    """
    # pyarrow takes a noticeable part of a second to import, and a local run's status needs none of it
    from pyarrow import fs

    settings = parse_qs(urlsplit(uri).query)
    separator = "&" if settings else "?"
    with as_os_error():
        if not uri.startswith("s3://"):
            limit = "" if "retry_limit_seconds" in settings else f"{separator}retry_limit_seconds={GCS_RETRY_SECONDS}"
            filesystem, root = fs.FileSystem.from_uri(uri + limit)
            return Place(filesystem, filesystem, root)
        if "endpoint_override" in settings or any(os.environ.get(name) for name in ENDPOINTS):
            os.environ.setdefault(CHECKSUMS, "when_required")
        filesystem, root = fs.FileSystem.from_uri(uri)
        # at once: three requests for a few bytes; delayed: an upload that can't begin leaves an empty object behind
        return Place(_cut_short(filesystem, is_delayed=True), _cut_short(filesystem, is_delayed=False), root)


def _cut_short(filesystem: Any, is_delayed: bool) -> Any:
    """The same S3 filesystem with our bounds: with those of `from_uri` a server that is dark costs 99 seconds a call.

    `from_uri` alone understands the URI, but takes no such settings. What it understood is in the pickled form.
    """
    from pyarrow import fs

    make, (settings,) = filesystem.__reduce__()
    if not make(settings).equals(filesystem):
        return filesystem  # the pickled form lacks some settings of TLS
    tries = fs.AwsStandardS3RetryStrategy(max_attempts=S3_TRIES)
    bounds = {"retry_strategy": tries, "connect_timeout": CONNECT_SECONDS, "request_timeout": ANSWER_SECONDS}
    return fs.S3FileSystem(**(settings | bounds | {"allow_delayed_open": is_delayed}))


@contextmanager
def as_os_error() -> Iterator[None]:
    """Give the errors of pyarrow a number, but for those that may pass.

    `FileNotFoundError` is an absent object, `PermissionError` a refusal, ENXIO an absent bucket, EINVAL a wrong call.
    """
    from pyarrow import ArrowException

    try:
        yield
    except ArrowException as error:
        raise OSError(errno.EINVAL, str(error)) from None
    except OSError as error:
        if error.errno is not None or type(error) is not OSError:
            raise
        raise _numbered(str(error)) from None


def _numbered(text: str) -> OSError:
    for number, signs in ((errno.ENXIO, NO_BUCKET), (errno.ENOENT, GONE), (errno.EACCES, REFUSED)):
        if any(sign in text for sign in signs):
            return OSError(number, text)
    return OSError(text)
