"""Files behind URIs that no run folder has: `hf://` and what else fsspec knows. They are read, and never written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from shutil import copyfileobj
from typing import IO, Any

from swiftbatch.jobs.storage.local_folder import COPY_BYTES
from swiftbatch.jobs.storage.store import StoreError
from swiftbatch.jobs.storage.uris import hidden_credentials, shown_uri

MAX_PROBLEM = 300  # characters; some libraries tell long stories


def copy_foreign(uri: str, target: IO[bytes]) -> bool:
    """Write the bytes of a file to `target`; False where there is none. Raises StoreError."""
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    with _reached(uri) as (filesystem, path):
        if not filesystem.isfile(path):
            return False
        with PyFileSystem(FSSpecHandler(filesystem)).open_input_stream(path) as source:
            copyfileobj(source, target, COPY_BYTES)
    return True


def matching_foreign(uri: str) -> list[str]:
    """The URIs of the files that a pattern matches, sorted. Raises StoreError."""
    with _reached(uri) as (filesystem, pattern):
        if filesystem.isfile(pattern):
            return [uri]
        paths = [path for path in sorted(filesystem.glob(pattern)) if filesystem.isfile(path)]
        return [filesystem.unstrip_protocol(path) for path in paths]


@contextmanager
def _reached(uri: str) -> Iterator[tuple[Any, str]]:
    """The fsspec filesystem of a URI, and the path there. Whatever goes wrong is one StoreError: each has its own."""
    try:
        import fsspec

        yield fsspec.core.url_to_fs(uri)
    except Exception as error:
        problem = " ".join(hidden_credentials(str(error) or type(error).__name__, uri).split())
        raise StoreError(
            f"cannot read {shown_uri(uri)}: {problem[:MAX_PROBLEM]}; expected a path, file://, s3://, gs://, "
            "hf://datasets/ORG/NAME/FILE, or another place that fsspec reaches from here"
        ) from None
