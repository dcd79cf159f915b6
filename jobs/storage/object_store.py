"""Run folders in an object store (S3, GCS, Azure), through obstore."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from io import SEEK_END, UnsupportedOperation
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple
from urllib.error import HTTPError
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit
from urllib.request import Request, urlopen

import obstore
from obstore import exceptions
from obstore.store import AzureStore, GCSStore, S3Store

from swiftbatch.jobs.storage.folder_uri import S3_KEYS
from swiftbatch.jobs.storage.local_folder import ReplacedError

if TYPE_CHECKING:
    from obstore import GetOptions

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 10.0  # longest silence of a server
BYTES_MEANWHILE = 4 * 2**20  # a slow line takes so many in that time; longer requests get more time
MOST_SECONDS = 10**6.0  # for a whole request: only its progress bounds a long download
KEY_SECONDS = 300.0  # botocore gives keys that expire for at least twice as long

AMAZON = "https://s3.amazonaws.com"
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
STORES: dict[str, Any] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}

Keys = Callable[[], dict[str, Any]]


def connections(uri: str) -> Callable[[float], Any]:
    """Return a function that connects to a URI's place; its argument is the timeout of a request in seconds.

    The connection does not retry. May ask Amazon for the bucket's region. Raises `ValueError`, `OSError`.
    """
    parts = urlsplit(uri)
    bucket = parts.netloc.rpartition("@")[2]
    settings, client = _settings(parts)
    options: dict[str, Any] = {"prefix": unquote(parts.path).strip("/"), "retry_config": {"max_retries": 0}}
    if parts.scheme == "s3":
        options["credential_provider"] = _keys(parts, settings)
        _complete_s3(bucket, settings)
    elif parts.username == "anonymous":
        settings["skip_signature"] = "true"

    @lru_cache(4)
    def connect(seconds: float) -> Any:
        bounds = {"read_timeout": timedelta(seconds=seconds)}
        with as_os_error():
            return STORES[parts.scheme](bucket, config=settings, client_options=client | bounds, **options)

    return connect


def _settings(parts: SplitResult) -> tuple[dict[str, str], dict[str, Any]]:
    """Return store and client settings of a URI's query."""
    settings = dict(parse_qsl(parts.query))
    client = {"allow_http": True, "connect_timeout": timedelta(seconds=CONNECT_SECONDS)}
    client["timeout"] = timedelta(seconds=MOST_SECONDS)
    if settings.pop("tls_verify_certificates", "true") == "false":
        client["allow_invalid_certificates"] = True
    if file := settings.pop("tls_ca_file_path", ""):
        client["root_certificate"] = Path(file).read_bytes()
    scheme = settings.pop("scheme", "https")
    if host := settings.pop("endpoint_override", ""):
        settings["base_url" if parts.scheme == "gs" else "endpoint"] = f"{scheme}://{host}"
    return settings, client


def _keys(parts: SplitResult, settings: dict[str, str]) -> Keys | None:
    """Return the keys from URI, environment or Amazon's programs, or None to send unsigned requests."""
    names = ("access_key", "secret_key", "session_token")
    keys = [unquote(parts.username or ""), unquote(parts.password or ""), ""]
    keys = [key or settings.pop(name, "") for key, name in zip(keys, names, strict=True)]
    if not keys[0]:
        keys = [os.environ.get(name, "") for name in S3_KEYS]
    if keys[0]:
        return lambda: {
            "access_key_id": keys[0],
            "secret_access_key": keys[1],
            "token": keys[2] or None,
            "expires_at": None,
        }
    found = None if {"skip_signature", "aws_skip_signature"} & {*settings} else _found_keys()
    if found is None:
        settings["skip_signature"] = "true"
    return found


def _found_keys() -> Keys | None:
    """Return the keys of a profile, a program or this machine's role, if any. Raises ValueError."""
    from botocore.exceptions import BotoCoreError  # takes a third of a second to import, and few need it
    from botocore.session import Session

    try:
        found = Session().get_credentials()
    except BotoCoreError as error:
        raise ValueError(str(error)) from None
    if found is None:
        return None

    def keys() -> dict[str, Any]:
        now = found.get_frozen_credentials()
        until = datetime.now(UTC) + timedelta(seconds=KEY_SECONDS)
        return {
            "access_key_id": now.access_key,
            "secret_access_key": now.secret_key,
            "token": now.token,
            "expires_at": until,
        }

    return keys


def _complete_s3(bucket: str, settings: dict[str, str]) -> None:
    """Fill in endpoint and region. Empty variables count as absent."""
    endpoint = settings.pop("endpoint", "") or _first(os.environ.get(name) for name in ENDPOINTS)
    region = settings.get("region") or ("" if endpoint else _region(bucket))
    region = region or _first(os.environ.get(name) for name in REGIONS) or "us-east-1"
    own = f"https://s3.{region}.amazonaws.com{'.cn' if region.startswith('cn-') else ''}"
    settings |= {"region": region, "aws_endpoint_url_s3": (endpoint or own).rstrip("/")}


def _first(values: Iterable[str | None]) -> str:
    return next((value for value in values if value), "")


def _region(bucket: str) -> str:
    """Ask Amazon for a bucket's region; return "" if there is no answer."""
    try:
        answer = urlopen(Request(f"{AMAZON}/{bucket}", method="HEAD"), timeout=CONNECT_SECONDS)
    except HTTPError as error:  # a refusal names the region too
        answer = error
    except OSError:
        return ""
    with answer:
        return str(answer.headers.get("x-amz-bucket-region") or "")


# Errors of obstore, as those of a disk.


NUMBERS = {
    FileNotFoundError: errno.ENOENT,
    exceptions.PreconditionError: errno.ECANCELED,
    exceptions.PermissionDeniedError: errno.EACCES,
    exceptions.UnauthenticatedError: errno.EACCES,
    exceptions.UnknownConfigurationKeyError: errno.EINVAL,
    ValueError: errno.EINVAL,
}
# causes that these error classes do not distinguish
NO_BUCKET = re.compile("<Code>(NoSuchBucket|ContainerNotFound)</Code>")
UNKNOWN_CALL = re.compile("status code: 501")
WRONG_CALL = re.compile("status code: (3|40[0-7]|41)")
BODY = re.compile(r"<.*?<Code>(.*?)</Code>(?:.*?<Message>(.*?)</Message>)?.*", re.DOTALL)
REQUEST = re.compile(r".*Error performing (\w+ \S+) in \S+ - (?:Server returned non-2xx status code: )?", re.DOTALL)
CAUSE = re.compile(r'(?:message|error): "([^"]+)"|kind: (Timeout)|source: (TimedOut)')


@contextmanager
def as_os_error() -> Iterator[None]:
    """Raise errors of obstore as an `OSError`, which has no error number if the error is transient.

    `FileNotFoundError`: absent object; `PermissionError`: refusal; ENXIO: absent bucket; EINVAL: wrong call; ENOTSUP:
    unknown to the server; ECANCELED: replaced object.
    """
    try:
        yield
    except (exceptions.BaseError, FileNotFoundError, ValueError) as error:
        raise OSError(_number(error), _told(str(error))) from None


def _number(error: Exception) -> int | None:
    if NO_BUCKET.search(str(error)):
        return errno.ENXIO
    for kind, number in NUMBERS.items():
        if isinstance(error, kind):
            return number
    if UNKNOWN_CALL.search(str(error)):
        return errno.ENOTSUP
    return errno.EINVAL if WRONG_CALL.search(str(error)) else None


def _told(text: str) -> str:
    """Return the request with the server's answer, or with the cause if the server did not answer."""
    said, _, details = text.partition("\n\nDebug source")
    said = REQUEST.sub(r"\1: ", said).rstrip(": ")
    said = BODY.sub(lambda found: ": ".join(word for word in found.groups() if word), said)
    causes = [_first(found) for found in CAUSE.findall(details)] if "HTTP error" in said else []
    return f"{said} ({causes[-1]})" if causes else said


# The storage behind a `Store` on an object store.


class ObjectVersion(NamedTuple):
    """Version of an object; `tag` changes with the content."""

    num_bytes: int
    tag: str

    @classmethod
    def of(cls, meta: Any) -> ObjectVersion:
        return cls(meta["size"], meta["e_tag"] or str(meta["last_modified"]))


class ObjectReader:
    """Reads one version of one object by ranges."""

    def __init__(self, store: Any, path: str) -> None:
        """Raise `FileNotFoundError` if there is no such object."""
        self._store, self._path = store, path
        self._object = _looked_up(store, path)
        self.version = ObjectVersion.of(self._object)
        self._position = 0

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes; b"" at the end. A failed call may be repeated. Raises `ReplacedError`."""
        end = min(self._position + size, self._object["size"])
        if end <= self._position:
            return b""
        options: GetOptions = {"range": (self._position, end)}
        if self._object["e_tag"]:
            options["if_match"] = self._object["e_tag"]
        try:
            with as_os_error():
                data = obstore.get(self._store, self._path, options=options).bytes().to_bytes()
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ECANCELED):
                raise ReplacedError from None
            raise
        self._position = end
        return data

    def seek(self, position: int) -> None:
        self._position = position

    def close(self) -> None:
        pass


def _looked_up(store: Any, path: str) -> Any:
    with as_os_error():
        try:
            return obstore.head(store, path)
        except FileNotFoundError:  # only the answer to this request tells an absent bucket from an absent object
            return obstore.get(store, path).meta


PART_BYTES = 10 * 2**20  # shorter objects go up in one request
NUM_PARTS_AT_ONCE = 4
MOST_BYTES_NEW = 4 * 2**30  # about as much as a server takes in one request
PROBE = ".exclusive"  # an object for tries of exclusive writes


class ObjectFolder:
    """All objects under one prefix. A write is one PUT or one multipart upload, whole without a rename."""

    def __init__(self, uri: str) -> None:
        self._connected = connections(uri)
        self._store = self._connected(ANSWER_SECONDS)
        self._is_exclusive = False  # set once a probe has shown it

    def write(self, path: str, data: bytes | memoryview) -> None:
        self._put(path, memoryview(data).cast("B"))

    def write_from(self, path: str, source: BinaryIO) -> None:
        self._put(path, _rest_of(source))

    def write_new_from(self, path: str, source: BinaryIO) -> bool:
        self._expect_exclusive()
        data = _rest_of(source)
        if data.nbytes > MOST_BYTES_NEW:
            if self.exists(path):
                return False
            self._put(path, data)
            return True
        if self._create(path, data):
            return True
        if self.exists(path):
            return False
        raise OSError("another request was on its way to the same object")

    def read(self, path: str) -> bytes | None:
        try:
            with as_os_error():
                return obstore.get(self._store, path).bytes().to_bytes()
        except FileNotFoundError:
            return None

    def read_part(self, path: str, start: int, length: int) -> bytes | None:
        source = self.open(path)
        if source is None:
            return None
        with closing(source):
            source.seek(start)
            return source.read(length)

    def open(self, path: str) -> ObjectReader | None:
        try:
            return ObjectReader(self._store, path)
        except FileNotFoundError:
            return None

    def exists(self, path: str) -> bool:
        return self.open(path) is not None

    def list(self, folder: str) -> list[str]:
        return [*self.sizes(folder)]

    def sizes(self, folder: str) -> dict[str, int | None]:
        found = self.versions(folder).items()
        return {path.rpartition("/")[2]: version and version.num_bytes for path, version in found}

    def versions(self, folder: str) -> dict[str, ObjectVersion | None]:
        """Return the paths in a folder with each object's version, or None for a subfolder."""
        with as_os_error():
            found = obstore.list_with_delimiter(self._store, folder)
        versions: dict[str, ObjectVersion | None] = dict.fromkeys(found["common_prefixes"])
        # some programs mark an empty folder with an object, which obstore calls by the folder's name
        return versions | {each["path"]: ObjectVersion.of(each) for each in found["objects"] if each["path"] != folder}

    def move(self, path: str, target: str) -> bool:
        data = self.read(path)
        if data is None:
            return False
        self.write(target, data)
        self.delete(path)
        return True

    def delete_leftovers(self, folder: str, min_age_seconds: float) -> None:
        pass  # an unfinished write has no name

    def delete(self, path: str) -> None:
        with suppress(FileNotFoundError), as_os_error():
            obstore.delete(self._store, path)

    def delete_folder(self, folder: str) -> None:
        with as_os_error():
            for page in obstore.list(self._store, folder, chunk_size=1000):
                paths = [each["path"] for each in page if each["path"] != folder]
                try:
                    obstore.delete(self._store, paths)
                except FileNotFoundError:  # another one deletes as well
                    for path in paths:
                        self.delete(path)

    def _put(self, path: str, data: memoryview) -> None:
        """Write an object; if a part fails, the old object stays."""
        store = self._patient(min(data.nbytes, PART_BYTES * NUM_PARTS_AT_ONCE))
        with as_os_error():
            obstore.put(store, path, data, chunk_size=PART_BYTES, max_concurrency=NUM_PARTS_AT_ONCE)

    def _create(self, path: str, data: memoryview) -> bool:
        """Write a new object in one request; False if it exists, or may be about to."""
        with as_os_error():
            try:
                obstore.put(self._patient(data.nbytes), path, data, mode="create")
            except exceptions.AlreadyExistsError:
                return False
            return True

    def _expect_exclusive(self) -> None:
        """Raise OSError if the server ignores `If-None-Match`, so that two writers would both win."""
        if not self._is_exclusive and all(self._create(PROBE, memoryview(b"")) for _ in range(2)):
            raise OSError(errno.ENOTSUP, "the server ignores `If-None-Match: *` and replaced a file that was there")
        self._is_exclusive = True

    def _patient(self, num_bytes: int) -> Any:
        return self._connected(ANSWER_SECONDS * (1 + num_bytes // BYTES_MEANWHILE))


def _rest_of(source: BinaryIO) -> memoryview:
    """Return the rest of a file, mapped into memory if possible."""
    try:
        descriptor, start = source.fileno(), source.tell()
    except UnsupportedOperation:
        return memoryview(source.read())
    if source.seek(0, SEEK_END) <= start:
        return memoryview(b"")
    return memoryview(mmap(descriptor, 0, access=ACCESS_READ))[start:]
