"""State files (Arrow record batches of one row) and KV segments (Arrow tensors).

A segment's tensors are first position, owner, tokens, keys and values; they load without a copy.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftbatch.jobs.checkpoints.token_log import TokenIds
from swiftbatch.jobs.file_owner import DamagedFileError, Identity

State = dict[str, NDArray[Any]]

IDENTITY = b"identity"
PLAIN_KINDS = "biufc"  # bool, integers, floats, complex: nothing needs pickle


@dataclass(frozen=True)
class LayerStates:
    """States of layers after `num_positions` positions, in place of keys and values."""

    num_positions: int
    arrays: State  # never changed

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


def encode_state(state: State, identity: Identity) -> memoryview:
    """Encode a job's state. Raises `TypeError` for dtypes that Arrow lacks."""
    import pyarrow as pa

    columns = [(_field(name, array), _column(array)) for name, array in state.items()]
    schema = pa.schema([field for field, _ in columns], metadata={IDENTITY: identity.pack()})
    batch = pa.record_batch([column for _, column in columns], schema=schema)
    # the first pass counts bytes: a growing buffer would need twice the memory
    counter = pa.MockOutputStream()
    _write(batch, counter)
    buffer = pa.allocate_buffer(counter.size())
    _write(batch, pa.FixedSizeBufferWriter(buffer))
    return memoryview(buffer)


def decode_state(data: bytes) -> State:
    """Decode a state file into new, writable arrays. Raises `DamagedFileError`."""
    import pyarrow as pa

    try:
        batch = pa.ipc.open_file(pa.BufferReader(data)).get_batch(0)
        return {field.name: _array(field, batch.column(index)) for index, field in enumerate(batch.schema)}
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise DamagedFileError(f"found no usable state: {' '.join(str(error).split())}") from None


def identity_of_state(data: bytes) -> Identity | None:
    """Read the owner without checking the file; None if it names none."""
    import pyarrow as pa

    try:
        metadata = pa.ipc.open_file(pa.BufferReader(data)).schema.metadata
        return None if metadata is None else Identity.unpack(metadata[IDENTITY])[0]
    except (pa.ArrowException, OSError, ValueError, KeyError):
        return None


def _field(name: str, array: NDArray[Any]) -> Any:
    import pyarrow as pa

    if array.dtype.kind not in PLAIN_KINDS:
        raise TypeError(f"state {name!r}: found dtype {array.dtype}, expected plain numbers")
    layout = {"dtype": array.dtype.newbyteorder("<").str, "shape": json.dumps(array.shape)}
    return pa.field(name, pa.large_binary(), metadata=layout)


def _column(array: NDArray[Any]) -> Any:
    """Return the array as an Arrow column, copying it only if it is not contiguous."""
    import pyarrow as pa

    values = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    offsets = np.array([0, values.nbytes], dtype=np.int64)
    return pa.Array.from_buffers(pa.large_binary(), 1, [None, pa.py_buffer(offsets), pa.py_buffer(values)])


def _write(batch: Any, sink: Any) -> None:
    import pyarrow as pa

    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)


def _array(field: Any, column: Any) -> NDArray[Any]:
    dtype = np.dtype(field.metadata[b"dtype"].decode())
    if dtype.kind not in PLAIN_KINDS:
        raise ValueError(f"found dtype {dtype}, expected plain numbers")
    values = np.frombuffer(column[0].as_buffer(), dtype=dtype)
    return values.reshape(json.loads(field.metadata[b"shape"])).copy()


# Arrow has no bfloat16, so 16-bit floats are stored as bits; 8-bit rows as bytes of codes and scales
KV_DTYPES = tuple(map(np.dtype, ("uint16", "float32", "int8", "uint8")))
HEADERS_SIZE = 4096  # bytes for Arrow's four tensor headers and the owner: a few hundred suffice


@dataclass(frozen=True)
class Segment:
    """The tokens, prompt included, keys and values of positions `[start, end)`."""

    start: int
    token_ids: TokenIds  # [num_positions]
    kv: NDArray[Any]  # [num_rows, num_positions, row_width] of one of `KV_DTYPES`; may be a view

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


def encode_segment(segment: Segment, identity: Identity) -> memoryview:
    """Encode a segment, copying `kv` once. Raises `TypeError` for wrong dtypes or shapes."""
    import pyarrow as pa

    _check(segment)
    kv, token_ids = segment.kv, np.ascontiguousarray(segment.token_ids)
    header = np.array([segment.start], dtype=np.int64)
    owner = np.frombuffer(identity.pack(), dtype=np.uint8)
    buffer = pa.allocate_buffer(kv.nbytes + token_ids.nbytes + HEADERS_SIZE)
    sink = pa.FixedSizeBufferWriter(buffer)
    for array in (header, owner, token_ids, kv):
        pa.ipc.write_tensor(pa.Tensor.from_numpy(array), sink)
    return memoryview(buffer)[: sink.tell()]


def decode_segment(data: bytes) -> Segment:
    """Decode a segment into read-only views of `data`. Raises `DamagedFileError`."""
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
    """Read the owner without checking the file; None if it names none."""
    import pyarrow as pa

    try:
        _, owner = _read_head(pa.BufferReader(data))
        return Identity.unpack(owner)[0]
    except (pa.ArrowException, OSError, ValueError):
        return None


def _read_head(source: Any) -> tuple[int, memoryview]:
    """Read the first position and the owner's bytes."""
    import pyarrow as pa

    header = pa.ipc.read_tensor(source).to_numpy()
    if header.dtype != np.int64 or header.shape != (1,):
        raise DamagedFileError("found no KV segment: expected its header first")
    return int(header[0]), memoryview(pa.ipc.read_tensor(source).to_numpy().tobytes())


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
