"""The token log: a header with a checksum, then 4 bytes a token, little-endian."""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.uint32]

MAGIC = b"SWTOKENS"
VERSION = 1
HEADER = struct.Struct("<8sIII")  # magic, version, number of tokens, CRC-32 of the tokens' bytes


class DamagedFileError(ValueError):
    """A file is torn, corrupt, or of a newer version; the text says what was found and what was expected."""


def encode_tokens(token_ids: TokenIds) -> bytes:
    """The bytes of a log with `token_ids` [num_tokens]. Raises `TypeError` for another dtype or shape."""
    if token_ids.dtype != np.uint32 or token_ids.ndim != 1:
        raise TypeError(f"found token ids of {token_ids.dtype} {token_ids.shape}, expected uint32 [num_tokens]")
    payload = token_ids.astype("<u4", copy=False).tobytes()
    return HEADER.pack(MAGIC, VERSION, len(token_ids), zlib.crc32(payload)) + payload


def decode_tokens(data: bytes) -> TokenIds:
    """The tokens [num_tokens] of a log, in memory of their own. Raises `DamagedFileError`, never gives wrong tokens."""
    if len(data) < HEADER.size:
        raise DamagedFileError(f"found {len(data)} bytes, expected a header of {HEADER.size}")
    magic, version, num_tokens, checksum = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise DamagedFileError("found no token log: expected it to start with its magic word")
    if version != VERSION:
        raise DamagedFileError(f"found version {version}, expected {VERSION}")
    payload = data[HEADER.size :]
    if len(payload) != 4 * num_tokens:
        raise DamagedFileError(f"found {len(payload)} bytes of tokens, expected {4 * num_tokens}")
    if zlib.crc32(payload) != checksum:
        raise DamagedFileError("found tokens that do not match their checksum")
    return np.frombuffer(payload, dtype="<u4").astype(np.uint32)
