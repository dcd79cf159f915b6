"""Models in object stores, as `s3://bucket/models/NAME`: their local snapshots, next to those of hub models."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from functools import partial
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote, urlsplit
from uuid import uuid4

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.storage.folder_uri import OBJECT_STORES, hidden_credentials, local_path, shown_uri
from swiftbatch.jobs.storage.local_folder import ReplacedError
from swiftbatch.jobs.storage.retries import START_RETRY_SECONDS, STORE_RETRY_SECONDS, Retries
from swiftbatch.worker.model.formats.contract import StoredTensor
from swiftbatch.worker.model.gguf.gguf_model import SUFFIX
from swiftbatch.worker.model.hub import BLOBS, PART, SNAPSHOTS, alone_on_this_machine

if TYPE_CHECKING:
    from swiftbatch.jobs.storage.object_store import ObjectReader, ObjectVersion

BUCKETS = "swiftbatch--buckets"  # folder in the hub's cache
OBJECTS = "objects"  # subfolder of links to blobs, which are named by an object's version
UNFINISHED = ".part"
SUBFOLDERS = ("parts", "chat_templates")  # ends of their names
NUM_AT_ONCE = 4  # objects
PIECE_BYTES = 2**25  # of a request
MOST_HEADER_BYTES = 10**8  # of a safetensors file, as the format says
AT_START, AMID = Retries(seconds=START_RETRY_SECONDS), Retries(seconds=STORE_RETRY_SECONDS)

T = TypeVar("T")


def is_in_bucket(model: str) -> bool:
    return model.startswith(tuple(f"{scheme}://" for scheme in OBJECT_STORES))


class Bucket:
    """A model's objects, in the versions that they have now."""

    def __init__(self, model: str) -> None:
        """Raise ModelError if there are no objects."""
        from swiftbatch.jobs.storage.object_store import ObjectFolder  # its library takes time to import

        self.model = self._uri = model
        self._ask(lambda: local_path(model))
        parts = urlsplit(model)
        if parts.query or "@" in parts.netloc:
            raise ModelError(
                f"model {shown_uri(model)}: found settings or credentials in its URI; expected {parts.scheme}://bucket/"
                "folder, with them in the environment of every node"
            )
        is_file = model.endswith(SUFFIX)
        self._uri = model.rpartition("/")[0] if is_file else model.rstrip("/")
        self.file = unquote(model.rpartition("/")[2]) if is_file else None
        self._folder = self._ask(lambda: ObjectFolder(self._uri))
        pattern = PART.sub("-*-of-", escape(self.file)) if self.file else "*"
        self.objects = {path: found for path, found in self._ask(self._listed) if fnmatch(path, pattern)}
        self._is_given_up = False
        if not self.objects:
            raise ModelError(f"model {model}: no such object; upload the model, or correct --model")

    def names(self, patterns: Iterable[str]) -> list[str]:
        """Return the objects that match one of the patterns, in which `*` matches slashes too."""
        patterns = list(patterns)
        return sorted(name for name in self.objects if any(fnmatch(name, pattern) for pattern in patterns))

    def folder(self, names: Iterable[str]) -> Path:
        """Return the snapshot of these versions, after a download of `names` if it lacks them. Raises ModelError."""
        from huggingface_hub.constants import HF_HUB_CACHE

        versions = json.dumps(sorted(self.objects.items()))
        root = Path(HF_HUB_CACHE) / BUCKETS / _key(self._uri)
        snapshot = root / SNAPSHOTS / _key(versions)
        wanted = list(names)
        try:
            if not all((snapshot / name).exists() for name in wanted):
                with alone_on_this_machine(f"{BUCKETS}--{root.name}"):
                    self._complete(root, snapshot, wanted)
        except OSError as error:
            raise ModelError(
                f"model {self.model}: it can't be kept in {root} ({error}); make room there, or set HF_HOME"
            ) from None
        return snapshot

    def heads(self, name: str) -> dict[str, StoredTensor]:
        """Return the tensors that a safetensors file's header lists. Raises ModelError."""
        reader = self._reader(name)
        num_bytes = int.from_bytes(self._ask(lambda: reader.read(8)), "little")
        try:
            said = json.loads(self._ask(lambda: reader.read(min(num_bytes, MOST_HEADER_BYTES))))
            return {
                each: StoredTensor(str(head["dtype"]), tuple(head["shape"]))
                for each, head in said.items()
                if each != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ModelError(f"model {self.model}: {name} is damaged or cut off; upload it again") from None

    def _listed(self) -> list[tuple[str, ObjectVersion]]:
        found, folders = [], [""]
        while folders:
            for path, version in self._folder.versions(folders.pop()).items():
                if version is not None:
                    found.append((path, version))
                elif path.partition("/")[0].endswith(SUBFOLDERS):
                    folders.append(path)
        return found

    def _complete(self, root: Path, snapshot: Path, names: list[str]) -> None:
        for folder in (root / BLOBS, root / OBJECTS, snapshot):
            folder.mkdir(parents=True, exist_ok=True)
        for file in (root / BLOBS).glob(f"*{UNFINISHED}"):  # of killed processes
            file.unlink()
        known = {name: root / OBJECTS / _key(json.dumps([name, self.objects[name]])) for name in names}
        missing = [name for name in names if not known[name].exists()]
        self._download({name: known[name] for name in missing})
        for name, link in known.items():
            _link(snapshot / name, link.resolve())

    def _download(self, links: dict[str, Path]) -> None:
        """Write the objects as blobs, and a link to each."""
        if (num_bytes := sum(self.objects[name].num_bytes for name in links)) > PIECE_BYTES:
            told = f"downloads {len(links)} {'files' if len(links) > 1 else 'file'}, {num_bytes / 1e6:,.0f} MB"
            print(f"model {self.model}: {told}", file=sys.stderr, flush=True)
        threads = ThreadPoolExecutor(NUM_AT_ONCE)
        try:
            list(threads.map(self._download_one, links, links.values()))
        except BaseException:
            self._is_given_up = True  # other threads stop at their next piece
            raise
        finally:
            threads.shutdown(cancel_futures=True)

    def _download_one(self, name: str, link: Path) -> None:
        blobs, digest = link.parent.parent / BLOBS, hashlib.sha256()
        aside = blobs / f"{uuid4().hex}{UNFINISHED}"
        try:
            with aside.open("wb") as file:
                for piece in self._pieces(name):
                    digest.update(piece)
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            aside.rename(blob := blobs / digest.hexdigest())
        finally:
            aside.unlink(missing_ok=True)
        _link(link, blob)

    def _pieces(self, name: str) -> Iterator[bytes]:
        reader = self._reader(name)
        while piece := self._ask(partial(reader.read, PIECE_BYTES), AMID):
            if self._is_given_up:
                raise ModelError(f"model {self.model}: its download was given up")
            yield piece

    def _reader(self, name: str) -> ObjectReader:
        """Open an object. Raises ModelError, also if it is not the listed version."""

        def opened() -> ObjectReader:
            found = self._folder.open(name)
            if found is None or found.version != self.objects[name]:
                raise ReplacedError
            return found

        return self._ask(opened, AMID)

    def _ask(self, ask: Callable[[], T], retries: Retries = AT_START) -> T:
        try:
            return retries.call(ask)
        except ReplacedError:
            raise ModelError(f"model {self.model}: its objects were replaced meanwhile; try again") from None
        except (OSError, ValueError) as error:
            told = " ".join(hidden_credentials(getattr(error, "strerror", None) or str(error), self._uri).split())
            raise ModelError(
                f"model {self.model}: {told}; check the bucket, the endpoint and the credentials on this machine"
            ) from None


def _key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _link(place: Path, target: Path) -> None:
    """Make a relative link, which replaces an older one as a whole."""
    place.parent.mkdir(parents=True, exist_ok=True)
    aside = place.with_name(f".{uuid4().hex}")
    aside.symlink_to(os.path.relpath(target, place.parent))
    aside.replace(place)
