"""The token log: a header with a checksum, whose it is, the rewinds, then 4 bytes a token, little-endian."""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from swiftbatch.jobs.file_owner import DamagedFileError, Identity, take_identity

TokenIds = NDArray[np.uint32]

MAGIC = b"SWTOKENS"
HEADER = struct.Struct("<8sII")  # magic, number of tokens, CRC-32 of what follows
NUM_REWINDS = struct.Struct("<I")
REWIND = struct.Struct("<II")


class Rewind(NamedTuple):
    """A loop of the output was taken back: of `num_tokens` generated ones the first `num_kept` stayed."""

    num_tokens: int
    num_kept: int


class TokenLog(NamedTuple):
    """The output of a job so far: `token_ids` [num_tokens] as they stand, and all rewinds, oldest first."""

    token_ids: TokenIds
    rewinds: tuple[Rewind, ...] = ()

    @property
    def progress(self) -> tuple[int, int]:
        """A pair that is the greater, the further the job was: a rewind takes tokens back, and none is ever undone."""
        return len(self.rewinds), len(self.token_ids)

    def until(self, num_tokens: int) -> TokenLog:
        """The log as it was when the job last had these first tokens and no more, without rewinds to behind them."""
        if num_tokens >= len(self.token_ids):
            return self
        numbers = (number for number, rewind in enumerate(self.rewinds, 1) if rewind.num_kept <= num_tokens)
        return TokenLog(self.token_ids[:num_tokens], self.rewinds[: max(numbers, default=0)])


def encode_log(log: TokenLog, identity: Identity) -> bytes:
    """The bytes of a job's log. Raises `TypeError` for token ids of another dtype or shape."""
    token_ids, rewinds = log
    if token_ids.dtype != np.uint32 or token_ids.ndim != 1:
        raise TypeError(f"found token ids of {token_ids.dtype} {token_ids.shape}, expected uint32 [num_tokens]")
    head = identity.pack() + NUM_REWINDS.pack(len(rewinds)) + b"".join(REWIND.pack(*each) for each in rewinds)
    payload = head + token_ids.astype("<u4", copy=False).tobytes()
    return HEADER.pack(MAGIC, len(token_ids), zlib.crc32(payload)) + payload


def decode_log(data: bytes, identity: Identity) -> TokenLog:
    """The log of a job, its tokens in memory of their own. Raises `DamagedFileError`, never gives wrong tokens."""
    if len(data) < HEADER.size:
        raise DamagedFileError(f"found {len(data)} bytes, expected a header of {HEADER.size}")
    magic, num_tokens, checksum = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise DamagedFileError("found no token log: expected it to start with its magic word")
    payload = data[HEADER.size :]
    if zlib.crc32(payload) != checksum:
        raise DamagedFileError(f"found {len(payload)} bytes that do not match their checksum")
    payload = payload[take_identity(payload, identity) :]
    start = _size_of_rewinds(payload)
    if len(payload) != start + 4 * num_tokens:
        raise DamagedFileError(f"found {len(payload) - start} bytes of tokens, expected {4 * num_tokens}")
    rewinds = tuple(Rewind(*each) for each in REWIND.iter_unpack(payload[NUM_REWINDS.size : start]))
    return TokenLog(np.frombuffer(payload[start:], dtype="<u4").astype(np.uint32), rewinds)


def _size_of_rewinds(payload: bytes) -> int:
    """Bytes of the rewinds, in front of the tokens."""
    if len(payload) < NUM_REWINDS.size:
        raise DamagedFileError(f"found {len(payload)} bytes behind the header, expected the number of rewinds")
    (num_rewinds,) = NUM_REWINDS.unpack_from(payload)
    size = NUM_REWINDS.size + int(num_rewinds) * REWIND.size
    if size > len(payload):
        raise DamagedFileError(f"found {len(payload)} bytes behind the header, expected {size} of rewinds first")
    return size
