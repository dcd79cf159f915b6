"""Run folders in an object store (S3, GCS): its URI, credentials and connection, and reads and writes there."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from io import SEEK_END, UnsupportedOperation
from mmap import ACCESS_READ, mmap
from threading import current_thread, main_thread
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt

from swiftbatch.jobs.storage.local_folder import ReplacedError

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


class StoreLocation(NamedTuple):
    """A `pyarrow.fs.FileSystem` for objects of one request, one for those of several parts, and bucket with prefix."""

    filesystem: Any
    multipart: Any
    root: str


def open_location(uri: str) -> StoreLocation:
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
            return StoreLocation(filesystem, filesystem, root)
        if "endpoint_override" in settings or any(os.environ.get(name) for name in ENDPOINTS):
            os.environ.setdefault(CHECKSUMS, "when_required")
        filesystem, root = fs.FileSystem.from_uri(uri)
        # at once: three requests for a few bytes; delayed: an upload that can't begin leaves an empty object behind
        return StoreLocation(_cut_short(filesystem, is_delayed=True), _cut_short(filesystem, is_delayed=False), root)


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


# The storage behind a `Store` on an object store, through `pyarrow.fs`.


class ObjectReader:
    """Reads one object in one version, though others may replace it meanwhile.

    Every read is a request of its own, which gets what is there then: the end is checked to be the beginning's.
    """

    def __init__(self, filesystem: Any, full_path: str) -> None:
        """Raises `FileNotFoundError` when there is no such object."""
        self._filesystem = filesystem
        self._full_path = full_path
        with as_os_error():
            self._file = filesystem.open_input_file(full_path)
            self._version = _version(self._file)

    def read(self, size: int | None = None) -> bytes:
        """The next `size` bytes, or the rest; b"" at the end. After an error the same bytes can be asked for again.

        Raises `ReplacedError`, with the last bytes at the latest.
        """
        try:
            with as_os_error():
                data = bytes(self._file.read(size))
        except OSError:
            self._check()
            raise
        if size is None or not data:
            self._check()
        return data

    def seek(self, position: int) -> None:
        with as_os_error():
            self._file.seek(position)

    def _check(self) -> None:
        try:
            with as_os_error(), self._filesystem.open_input_file(self._full_path) as now:
                is_same = _version(now) == self._version
        except FileNotFoundError:
            is_same = False
        if not is_same:
            raise ReplacedError

    def close(self) -> None:
        self._file.close()


def _version(file: Any) -> tuple[int, dict[str, bytes]]:
    return file.size(), file.metadata()


SINGLE_BYTES = 5 * 2**20  # S3 allows no smaller part, so what is shorter goes up in one request
PIECE_BYTES = 20 * 2**20  # two of pyarrow's parts; it copies what it has not sent yet
READ_TRIES = Retrying(stop=stop_after_attempt(5), retry=retry_if_exception_type(ReplacedError), reraise=True)


class ObjectFolder:
    """All objects under one prefix. A write is one PUT or one multipart upload, so it needs no rename to be whole."""

    def __init__(self, place: StoreLocation) -> None:
        self._filesystem = place.filesystem
        self._multipart = place.multipart
        self._root = place.root.rstrip("/")

    def write(self, path: str, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        if current_thread() is not main_thread():
            self._put(path, view)
            return
        # an interrupt comes to the main thread alone; there it would close the stream and publish what is in it so far
        with ThreadPoolExecutor(1) as pool:
            pool.submit(self._put, path, view).result()

    def write_from(self, path: str, source: BinaryIO) -> None:
        # nothing may fail between two pieces, so the source is not read there
        self.write(path, _rest_of(source))

    def write_new(self, path: str, data: bytes) -> bool:
        if self.exists(path):
            return False
        self.write(path, data)
        return True

    def write_new_from(self, path: str, source: BinaryIO) -> bool:
        if self.exists(path):
            return False
        self.write_from(path, source)
        return True

    def read(self, path: str) -> bytes | None:
        return READ_TRIES(self._read_once, path)

    def read_part(self, path: str, start: int, length: int) -> bytes | None:
        try:
            with as_os_error(), self._filesystem.open_input_file(self._full(path)) as file:
                return bytes(file.read_at(max(0, min(length, file.size() - start)), start))
        except FileNotFoundError:
            return None

    def open(self, path: str) -> ObjectReader | None:
        try:
            return ObjectReader(self._filesystem, self._full(path))
        except FileNotFoundError:
            return None

    def exists(self, path: str) -> bool:
        with as_os_error():
            return bool(self._filesystem.get_file_info(self._full(path)).is_file)

    def list(self, folder: str) -> list[str]:
        return [*self.sizes(folder)]

    def sizes(self, folder: str) -> dict[str, int | None]:
        from pyarrow import fs

        with as_os_error():
            selector = fs.FileSelector(self._full(folder), allow_not_found=True)
            infos = self._filesystem.get_file_info(selector)
            return {info.base_name: info.size if info.is_file else None for info in infos}

    def move(self, path: str, target: str) -> bool:
        data = self.read(path)
        if data is None:
            return False
        self.write(target, data)
        self.delete(path)
        return True

    def delete_leftovers(self, folder: str, min_age_seconds: float) -> None:
        pass  # a write has no other name before its own

    def delete(self, path: str) -> None:
        with suppress(FileNotFoundError), as_os_error():
            self._filesystem.delete_file(self._full(path))

    def delete_folder(self, folder: str) -> None:
        with suppress(FileNotFoundError), as_os_error():
            self._filesystem.delete_dir(self._full(folder))

    def _read_once(self, path: str) -> bytes | None:
        source = self.open(path)
        if source is None:
            return None
        with closing(source):
            return source.read()

    def _put(self, path: str, data: memoryview) -> None:
        """Write an object. Leaving the block closes the stream, which publishes it, unless a part failed before."""
        filesystem = self._filesystem if data.nbytes < SINGLE_BYTES else self._multipart
        with as_os_error(), filesystem.open_output_stream(self._full(path)) as stream:
            for start in range(0, data.nbytes, PIECE_BYTES):
                if start:
                    stream.flush()  # waits until the pieces before are sent: no more than one is in memory twice
                stream.write(data[start : start + PIECE_BYTES])

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root


def _rest_of(source: BinaryIO) -> bytes | memoryview:
    """The rest of a file, mapped into memory; anything else is read."""
    try:
        descriptor, start = source.fileno(), source.tell()
    except UnsupportedOperation:
        return source.read()
    if source.seek(0, SEEK_END) <= start:
        return b""
    return memoryview(mmap(descriptor, 0, access=ACCESS_READ))[start:]
