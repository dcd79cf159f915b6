"""The place of a run folder: a local path, or an object store and the connection to it, by URI and environment."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

OBJECT_STORES = ("s3", "gs")
SECRET_VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


def local_path(uri: str) -> str | None:
    """The absolute path of a local folder; None for an object store.

    Raises `ValueError` for any other scheme, and for an object store without a bucket.
    """
    if not uri or "\0" in uri:
        raise ValueError("expected a path, or a URI that starts with file://, s3:// or gs://")
    if "://" not in uri:
        return os.path.abspath(uri)
    parts = urlsplit(uri)
    if parts.scheme in OBJECT_STORES:
        if not parts.netloc.rpartition("@")[2]:
            raise ValueError(f"expected a bucket, as in {parts.scheme}://bucket/runs/my-run")
        return None
    if parts.scheme != "file":
        raise ValueError("expected a path, or a URI that starts with file://, s3:// or gs://")
    if parts.netloc or not parts.path.startswith("/"):
        raise ValueError("expected three slashes and an absolute path, as in file:///home/me/run")
    return os.path.abspath(unquote(parts.path))


def shown_uri(uri: str) -> str:
    """The URI without user, password and query, where credentials may stand."""
    if "://" not in uri:
        return uri or "''"
    scheme, rest = uri.split("://", 1)
    return f"{scheme}://{_split_user_info(rest.partition('?')[0])[1]}"


def hidden_credentials(text: str, uri: str) -> str:
    """`text` with every secret of `uri` and of the environment taken out."""
    secrets = _secrets(uri) | {os.environ[name] for name in SECRET_VARIABLES if os.environ.get(name)}
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def _secrets(uri: str) -> set[str]:
    if "://" not in uri:
        return set()
    place, _, query = uri.split("://", 1)[1].partition("?")
    values = _split_user_info(place)[0].split(":", 1) + [pair.partition("=")[2] for pair in query.split("&")]
    return {form for value in values if value for form in (value, unquote(value))}


def _split_user_info(place: str) -> tuple[str, str]:
    """User information, and bucket with prefix. An '@' in the prefix is its own, unless a password is not quoted."""
    head, slash, prefix = place.partition("/")
    if "@" in head or ":" not in head:
        user_info, _, bucket = head.rpartition("@")
        return user_info, bucket + slash + prefix
    user_info, _, rest = place.rpartition("@")
    return user_info or head, rest if user_info else "***"


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
