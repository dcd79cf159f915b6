"""Log-probabilities of running jobs, written before their token log.

A file has header, owner, token ids, their log-probabilities, and the likeliest tokens, as little-endian 4-byte values.
It is valid for any attempt with the same tokens up to its end.
"""

from __future__ import annotations

import hashlib
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from swiftbatch.jobs.checkpoints.checkpoint_files import CheckedFiles
from swiftbatch.jobs.checkpoints.token_log import TokenIds, TokenLog
from swiftbatch.jobs.file_owner import DamagedFileError, Identity, take_identity
from swiftbatch.jobs.logprobs import TokenLogprobs
from swiftbatch.jobs.storage.store import Store

MAGIC = b"SWLOGPRB"
HEADER = struct.Struct("<8sIII32s")  # magic, first token, num_tokens, num_top, SHA-256 of the tokens before
CHECKSUM = struct.Struct("<I")  # CRC-32 of the header and everything after this
NAME = re.compile(r"logprobs-([0-9]+)-([0-9]+)-[0-9]+\.bin")


class LogprobSpan(NamedTuple):
    """The log-probabilities of the output tokens from `start` on."""

    start: int
    digest_before: bytes  # hash of the tokens before `start`
    token_ids: TokenIds  # [num_tokens]
    logprobs: TokenLogprobs

    def num_agreeing(self, token_ids: TokenIds) -> int:
        """Count the span's first tokens that equal the output's tokens at the same positions."""
        if self.start > len(token_ids) or self.digest_before != _digest(token_ids[: self.start]):
            return 0
        theirs = token_ids[self.start : self.start + len(self.token_ids)]
        differs = self.token_ids[: len(theirs)] != theirs
        return int(differs.argmax()) if differs.any() else len(theirs)


def encode_span(token_ids: TokenIds, logprobs: TokenLogprobs, identity: Identity, start: int = 0) -> bytes:
    """Encode log-probabilities from `start` on; the arguments hold all tokens."""
    part = logprobs.part(start, len(token_ids))
    arrays = (token_ids[start:], part.logprobs, part.top_ids, part.top_logprobs)
    types = ("<u4", "<f4", "<i4", "<f4")
    numbers = b"".join(np.asarray(array, dtype).tobytes() for array, dtype in zip(arrays, types, strict=True))
    payload = identity.pack() + numbers
    header = HEADER.pack(MAGIC, start, len(part), part.num_top, _digest(token_ids[:start]))
    return header + CHECKSUM.pack(zlib.crc32(payload, zlib.crc32(header))) + payload


def decode_span(data: bytes, identity: Identity) -> LogprobSpan:
    """Decode a span into new memory. Raises `DamagedFileError`."""
    start, num_tokens, num_top, before, payload = _checked(data, identity)
    if len(payload) != 8 * num_tokens * (1 + num_top):
        raise DamagedFileError(f"found {len(payload)} bytes of numbers, expected {8 * num_tokens * (1 + num_top)}")
    numbers = np.frombuffer(payload, dtype="<u4").astype(np.uint32)
    ids, own, top_ids, top = np.split(numbers, np.cumsum([num_tokens, num_tokens, num_tokens * num_top]))
    shape = (num_tokens, num_top)
    found = TokenLogprobs.of(
        own.view(np.float32), top_ids.view(np.int32).reshape(shape), top.view(np.float32).reshape(shape)
    )
    return LogprobSpan(start, before, ids, found)


def _checked(data: bytes, identity: Identity) -> tuple[int, int, int, bytes, memoryview]:
    """Return the first token's index, the counts, the digest and the encoded values."""
    if len(data) < HEADER.size + CHECKSUM.size:
        raise DamagedFileError(f"found {len(data)} bytes, expected a header of {HEADER.size + CHECKSUM.size}")
    magic, start, num_tokens, num_top, before = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise DamagedFileError("found no log-probabilities: expected it to start with its magic word")
    header, payload = data[: HEADER.size], memoryview(data)[HEADER.size + CHECKSUM.size :]
    if CHECKSUM.pack(zlib.crc32(payload, zlib.crc32(header))) != data[HEADER.size : HEADER.size + CHECKSUM.size]:
        raise DamagedFileError(f"found {len(payload)} bytes that do not match their checksum")
    return start, num_tokens, num_top, before, payload[take_identity(payload, identity) :]


@dataclass
class WrittenSpans:
    """An attempt's files of log-probabilities and their tokens.

    A new file absorbs smaller ones, so that files stay few. The older log needs the smaller files until the new log is
    written; then they are deleted.
    """

    num_before: int = 0  # tokens covered by files of earlier attempts
    files: list[tuple[int, int, str]] = field(default_factory=list)  # (first token, end, name), consecutive
    replaced: list[str] = field(default_factory=list)  # names of files to delete

    @property
    def end(self) -> int:
        return self.files[-1][1] if self.files else self.num_before

    def start_of_next(self, num_tokens: int) -> int:
        """Return the index of the first token in the next file."""
        start = self.end
        for first, end, _ in reversed(self.files):
            if end - first > num_tokens - start:
                break
            start = first
        return start

    def add(self, start: int, num_tokens: int, name: str) -> None:
        self.replaced += [other for first, _, other in self.files if first >= start]
        self.files = [entry for entry in self.files if entry[0] < start] + [(start, num_tokens, name)]

    def rewind(self, num_tokens: int) -> None:
        self.num_before = min(self.num_before, num_tokens)
        self.files = [(first, min(end, num_tokens), name) for first, end, name in self.files if first < num_tokens]


def span_name(start: int, end: int, num_rewinds: int) -> str:
    """Return a file name that is never reused for other content."""
    return f"logprobs-{start}-{end}-{num_rewinds}.bin"


def _digest(token_ids: TokenIds) -> bytes:
    return hashlib.sha256(np.asarray(token_ids, dtype="<u4").tobytes()).digest()


class LogprobFiles:
    """The log-probability files of one run. Methods raise `StoreError`."""

    def __init__(self, store: Store, files: CheckedFiles) -> None:
        self._store = store
        self._files = files

    def write(
        self, folder: str, written: WrittenSpans, log: TokenLog, logprobs: TokenLogprobs, identity: Identity
    ) -> int:
        """Write the log-probabilities not yet `written`. Returns bytes written."""
        num_tokens = len(log.token_ids)
        if num_tokens <= written.end:
            return 0
        start = written.start_of_next(num_tokens)
        data = encode_span(log.token_ids, logprobs, identity, start)
        name = span_name(start, num_tokens, len(log.rewinds))
        self._store.write(f"{folder}/{name}", data)
        written.add(start, num_tokens, name)
        return len(data)

    def drop_replaced(self, folder: str, written: WrittenSpans) -> None:
        while written.replaced:
            self._store.delete(f"{folder}/{written.replaced[-1]}")
            written.replaced.pop()

    def read(self, folders: Sequence[str], token_ids: TokenIds, num_top: int, identity: Identity) -> TokenLogprobs:
        """Read an output's log-probabilities, up to the first token that no file covers."""
        decode = partial(decode_span, identity=identity)
        places = sorted(self._places(folders), key=lambda place: place[:2])
        spans: dict[str, LogprobSpan | None] = {}
        parts: list[TokenLogprobs] = []
        num_found = 0
        while num_found < len(token_ids):
            reaching = ((end, path) for start, end, path in places if start <= num_found < end)
            for _, path in sorted(reaching, reverse=True):
                if path not in spans:
                    spans[path] = self._files.decoded(path, self._store.read(path), decode)
                span = spans[path]
                if span is None or span.logprobs.num_top != num_top or span.start > num_found:
                    continue  # torn, or another file under this name
                end = span.start + span.num_agreeing(token_ids)
                if end > num_found:
                    parts.append(span.logprobs.part(num_found - span.start, end - span.start))
                    num_found = end
                    break
            else:
                break
        return TokenLogprobs.joined(parts, num_top)

    def _places(self, folders: Sequence[str]) -> Iterator[tuple[int, int, str]]:
        for folder in folders:
            for name in self._store.list(folder):
                if found := NAME.fullmatch(name):
                    yield int(found[1]), int(found[2]), f"{folder}/{name}"
