"""A KV segment as a file: Arrow IPC tensors one behind the other, which load without a copy.

They are a header, whose segment it is (not in version 1), the tokens, keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftbatch.jobs.checkpoints.token_log import TokenIds
from swiftbatch.jobs.identity import DamagedFileError, Identity

VERSION = 2
VERSION_OF_NOBODY = 1  # the version of older runs
# 16-bit floats are kept as their bits, since Arrow has no bfloat16; rows in 8 bits as the bytes of codes and scales
KV_DTYPES = tuple(map(np.dtype, ("uint16", "float32", "int8", "uint8")))
HEADERS_SIZE = 4096  # room for what Arrow puts before four tensors, and the second of them: a few hundred bytes in all


@dataclass(frozen=True)
class Segment:
    """The positions `[start, end)` of one sequence: their tokens, prompt included, and their keys and values."""

    start: int
    token_ids: TokenIds  # [num_positions]
    kv: NDArray[Any]  # [num_rows, num_positions, row_width] of one of `KV_DTYPES`; may be a view

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


def encode_segment(segment: Segment, identity: Identity) -> memoryview:
    """The bytes of a job's segment file, in one buffer of that size: the only copy made of `kv`.

    Raises `TypeError` for arrays of another dtype or of shapes that do not go together.
    """
    import pyarrow as pa

    _check(segment)
    kv, token_ids = segment.kv, np.ascontiguousarray(segment.token_ids)
    header = np.array([VERSION, segment.start], dtype=np.int64)
    owner = np.frombuffer(identity.pack(), dtype=np.uint8)
    buffer = pa.allocate_buffer(kv.nbytes + token_ids.nbytes + HEADERS_SIZE)
    sink = pa.FixedSizeBufferWriter(buffer)
    for array in (header, owner, token_ids, kv):
        pa.ipc.write_tensor(pa.Tensor.from_numpy(array), sink)
    return memoryview(buffer)[: sink.tell()]


def decode_segment(data: bytes) -> Segment:
    """The segment of a file; its arrays are read-only views on `data`. Raises `DamagedFileError` for anything else."""
    import pyarrow as pa

    source = pa.BufferReader(data)
    try:
        start, _ = _read_head(source)
        token_ids, kv = (pa.ipc.read_tensor(source).to_numpy() for _ in range(2))
        segment = Segment(start, token_ids, kv)
        _check(segment)
        if not (kv.flags.c_contiguous and token_ids.flags.c_contiguous):
            raise DamagedFileError("found strides that belong to no KV segment")
    except (pa.ArrowException, OSError, TypeError) as error:
        raise DamagedFileError(f"found no usable KV segment: {' '.join(str(error).split())}") from None
    if source.tell() != len(data):
        raise DamagedFileError(f"found {len(data)} bytes, expected {source.tell()}")
    return segment


def identity_of_segment(data: bytes) -> Identity | None:
    """Read which job a segment's file names, before anything of it is checked; None where it names none."""
    import pyarrow as pa

    try:
        _, owner = _read_head(pa.BufferReader(data))
        return None if owner is None else Identity.unpack(owner)[0]
    except (pa.ArrowException, OSError, ValueError):
        return None


def _read_head(source: Any) -> tuple[int, memoryview | None]:
    """The first position, and the bytes of the identity, of a segment file's reader, which then is behind them."""
    import pyarrow as pa

    header = pa.ipc.read_tensor(source).to_numpy()
    if header.dtype != np.int64 or header.shape != (2,):
        raise DamagedFileError("found no KV segment: expected its header first")
    version, start = (int(number) for number in header)
    if version not in (VERSION_OF_NOBODY, VERSION):
        raise DamagedFileError(f"found version {version}, expected {VERSION_OF_NOBODY} or {VERSION}")
    if version == VERSION_OF_NOBODY:
        return start, None
    return start, memoryview(pa.ipc.read_tensor(source).to_numpy().tobytes())


def _check(segment: Segment) -> None:
    token_ids, kv = segment.token_ids, segment.kv
    if segment.start < 0 or token_ids.dtype != np.uint32 or token_ids.ndim != 1 or len(token_ids) == 0:
        raise TypeError(
            f"segment at {segment.start}: found token ids of {token_ids.dtype} {token_ids.shape}, "
            "expected a start of 0 or more and uint32 [num_positions]"
        )
    if kv.dtype not in KV_DTYPES or kv.ndim != 3 or kv.shape[1] != len(token_ids) or kv.size == 0:
        raise TypeError(
            f"segment at {segment.start}: found KV of {kv.dtype} {kv.shape}, "
            f"expected {', '.join(map(str, KV_DTYPES))} [num_rows, {len(token_ids)}, row_width]"
        )
