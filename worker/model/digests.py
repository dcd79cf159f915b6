"""SHA-256 of a model's files, and fingerprints that combine them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from io import BufferedReader
from pathlib import Path

from swiftbatch.worker.model.file_checks import (
    GENERATION_FILE,
    INDEX_FILE,
    PICKLED_INDEX,
    index_name,
    weight_names,
)
from swiftbatch.worker.model.hub import BLOBS

HASHED_FIRST = ("config.json", GENERATION_FILE, INDEX_FILE, "tokenizer.json", "tokenizer_config.json")
TEKKEN_FILE = "tekken.json"  # some Mistral models have only this tokenizer
OTHER_TOKENIZERS = ("tokenizer.json", "tokenizer.model")
SHA256 = re.compile("[0-9a-f]{64}")  # names a weight file in the hub's cache
MOST_READERS = 4  # files that are read and hashed at a time; hashlib lets go of Python's lock
TEXT_FILES = (
    "*.jinja",
    "*.model",
    "*.tiktoken",
    "*vocab*",
    "*merges*",
    "*token*.json",
    "chat_template*.json",
    "*chat_templates/**/*",
)


@dataclass(frozen=True)
class Digests:
    """The SHA-256 of each file that affects a model's tokens."""

    model: Mapping[str, str]  # config, tokenizer and weights, in the order of the fingerprint
    text: Mapping[str, str]  # all other files that affect the conversion of text to tokens, such as chat templates

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint_of(self.model)

    @cached_property
    def text_fingerprint(self) -> str:
        return fingerprint_of(self.text)

    def difference(self, expected: Mapping[str, str]) -> tuple[str, str | None, str | None] | None:
        """Return the first file whose SHA-256 is not the expected one, with the found and the expected SHA-256."""
        found = {**self.model, **self.text}
        names = (name for name in sorted({*found, *expected}) if found.get(name) != expected.get(name))
        return next(((name, found.get(name), expected.get(name)) for name in names), None)


def digests_of(path: Path, known_weights: Mapping[str, str] | None = None) -> Digests:
    """Hash a model folder, except weight files whose SHA-256 is in `known_weights` or told by the hub's cache.

    Whoever loads weights checks them.
    """
    known = known_weights or {}
    names = (*HASHED_FIRST, *((TEKKEN_FILE,) if has_tekken_alone(path) else ()))
    names = (*names, *((PICKLED_INDEX,) if index_name(path) == PICKLED_INDEX else ()))
    first = {name: _digest(path / name) for name in names if (path / name).is_file()}
    weights = {file.name: known.get(file.name) or hub_digest(file) for file in weight_files(path)}
    unknown = [name for name, digest in weights.items() if digest is None]
    with ThreadPoolExecutor(MOST_READERS) as threads:
        weights |= zip(unknown, threads.map(_digest, [path / name for name in unknown]), strict=True)
    texts = {file.relative_to(path).as_posix(): _digest(file) for file in text_files(path)}
    return Digests(first | {name: str(digest) for name, digest in weights.items()}, texts)


def hub_digest(file: Path) -> str | None:
    """Return the SHA-256 that the hub gave for a file of its cache, which names files by it; None for other files."""
    blob = file.resolve()
    return blob.name if blob.parent.name == BLOBS and SHA256.fullmatch(blob.name) else None


def has_tekken_alone(path: Path) -> bool:
    """Return whether a folder has Mistral's tokenizer and no other."""
    return (path / TEKKEN_FILE).is_file() and not any((path / name).is_file() for name in OTHER_TOKENIZERS)


def weight_files(path: Path) -> list[Path]:
    """Return a model's weight files: the single file, or otherwise the files that the index lists."""
    return sorted(path / name for name in weight_names(path))


def text_files(path: Path) -> list[Path]:
    """Return all other files that affect the conversion of text to tokens."""
    found = {file for pattern in TEXT_FILES for file in path.glob(pattern)}
    return sorted(file for file in found if file.name not in HASHED_FIRST and file.is_file())


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fingerprint_of(digests: Mapping[str, str]) -> str:
    """Return the SHA-256 over names and SHA-256 of files."""
    whole = hashlib.sha256()
    for name, digest in digests.items():
        whole.update(name.encode())
        whole.update(bytes.fromhex(digest))
    return whole.hexdigest()


class HashedStream:
    """A file that is read while another thread computes its SHA-256, one piece at a time."""

    def __init__(self, stream: BufferedReader, thread: ThreadPoolExecutor) -> None:
        self.stream = stream
        self._sha256 = hashlib.sha256()
        self._thread = thread
        self._pending: Future[None] | None = None

    def read(self, size: int) -> bytes:
        """Read `size` bytes. Raises ValueError if the file ends earlier."""
        data = bytearray(size)
        self.fill(memoryview(data))
        return bytes(data)

    def fill(self, room: memoryview) -> None:
        """Read until the buffer `room` is full. Raises ValueError if the file ends earlier."""
        if (num_read := self.stream.readinto(room)) < len(room):
            raise ValueError(f"found its end, expected {len(room) - num_read:,} bytes more")
        self._finish()
        self._pending = self._thread.submit(self._sha256.update, room)

    def digest(self) -> str:
        self._finish()
        return self._sha256.hexdigest()

    def _finish(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None
