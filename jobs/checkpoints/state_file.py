"""The state of a drafter, or of layers, as an Arrow IPC file: a record batch of one row, a binary column an array.

The schema's metadata say whose it is; those of older runs do not.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftbatch.jobs.identity import DamagedFileError, Identity

State = dict[str, NDArray[Any]]

IDENTITY = b"identity"
PLAIN_KINDS = "biufc"  # bool, integers, floats, complex: nothing that would have to be pickled


@dataclass(frozen=True)
class LayerStates:
    """The states that layers have behind the first `num_positions` positions, in place of keys and values."""

    num_positions: int
    arrays: State  # never changed

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


def encode_state(state: State, identity: Identity) -> memoryview:
    """The bytes of a job's state file; arrays of any shape. Raises `TypeError` for a dtype that is no plain number."""
    import pyarrow as pa

    columns = [(_field(name, array), _column(array)) for name, array in state.items()]
    schema = pa.schema([field for field, _ in columns], metadata={IDENTITY: identity.pack()})
    batch = pa.record_batch([column for _, column in columns], schema=schema)
    # a first pass that only counts: a buffer that grows would need the room twice
    counter = pa.MockOutputStream()
    _write(batch, counter)
    buffer = pa.allocate_buffer(counter.size())
    _write(batch, pa.FixedSizeBufferWriter(buffer))
    return memoryview(buffer)


def decode_state(data: bytes) -> State:
    """The arrays of a state file, writable and in memory of their own. Raises `DamagedFileError`."""
    import pyarrow as pa

    try:
        batch = pa.ipc.open_file(pa.BufferReader(data)).get_batch(0)
        return {field.name: _array(field, batch.column(index)) for index, field in enumerate(batch.schema)}
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise DamagedFileError(f"found no usable state: {' '.join(str(error).split())}") from None


def identity_of_state(data: bytes) -> Identity | None:
    """Read which job a state's file names, before anything of it is checked; None where it names none."""
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
    """One value: the array's bytes, not copied where they are in order already."""
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
