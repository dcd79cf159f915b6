"""A drafter's state as an Arrow IPC file: one record batch of one row, a binary column for each array."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jobs.token_log import DamagedFileError

State = dict[str, NDArray[Any]]

PLAIN_KINDS = "biufc"  # bool, integers, floats, complex: nothing that would have to be pickled


def encode_state(state: State) -> bytes:
    """The bytes of a state file; arrays of any shape. Raises `TypeError` for a dtype that is no plain number."""
    import pyarrow as pa

    fields, columns = [], []
    for name, array in state.items():
        if array.dtype.kind not in PLAIN_KINDS:
            raise TypeError(f"state {name!r}: found dtype {array.dtype}, expected plain numbers")
        layout = {"dtype": array.dtype.newbyteorder("<").str, "shape": json.dumps(array.shape)}
        fields.append(pa.field(name, pa.large_binary(), metadata=layout))
        data = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).tobytes()
        columns.append(pa.array([data], pa.large_binary()))
    batch = pa.record_batch(columns, schema=pa.schema(fields))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def decode_state(data: bytes) -> State:
    """The arrays of a state file, writable and in memory of their own. Raises `DamagedFileError`."""
    import pyarrow as pa

    try:
        batch = pa.ipc.open_file(pa.BufferReader(data)).get_batch(0)
        return {field.name: _array(field, batch.column(index)) for index, field in enumerate(batch.schema)}
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise DamagedFileError(f"found no usable state: {' '.join(str(error).split())}") from None


def _array(field: Any, column: Any) -> NDArray[Any]:
    dtype = np.dtype(field.metadata[b"dtype"].decode())
    if dtype.kind not in PLAIN_KINDS:
        raise ValueError(f"found dtype {dtype}, expected plain numbers")
    values = np.frombuffer(column[0].as_buffer(), dtype=dtype)
    return values.reshape(json.loads(field.metadata[b"shape"])).copy()
