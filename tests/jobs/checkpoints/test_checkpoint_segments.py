from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from swiftbatch.jobs.checkpoints.kv_segments import Segment, decode_segment, encode_segment
from swiftbatch.jobs.file_owner import DamagedFileError
from tests import ROOT
from tests.jobs.checkpoints.checkpoint_parts import IDENTITY, segment_of

WHOLE = bytes(encode_segment(segment_of(5, 12), IDENTITY))


@given(
    start=st.integers(0, 2**40),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 9), st.integers(1, 5)),
    dtype=st.sampled_from(["uint16", "float32"]),
    data=st.data(),
)
def test_a_segment_comes_back_bit_for_bit(
    start: int, shape: tuple[int, int, int], dtype: str, data: st.DataObject
) -> None:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    kv = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), dtype=dtype).reshape(shape)
    token_ids = np.array(
        data.draw(st.lists(st.integers(0, 2**32 - 1), min_size=shape[1], max_size=shape[1])), dtype=np.uint32
    )
    found = decode_segment(bytes(encode_segment(Segment(start, token_ids, kv), IDENTITY)))
    assert (found.start, found.end) == (start, start + shape[1])
    assert found.token_ids.tolist() == token_ids.tolist()
    # NaN bits count too
    assert (found.kv.dtype, found.kv.shape, found.kv.tobytes()) == (kv.dtype, kv.shape, kv.tobytes())


BUFFER = np.arange(6 * 50 * 8, dtype=np.uint16).reshape(6, 50, 8)
VIEWS = {
    "positions of a longer cache": BUFFER[:, 20:30],
    "every second head": BUFFER[::2, :10],
    "positions last in memory": np.moveaxis(BUFFER, 1, 2)[:, :5].transpose(0, 2, 1),
    "part of the head": BUFFER[:, :10, 2:6],
}


@pytest.mark.parametrize("name", VIEWS)
def test_any_strides_are_written_in_order(name: str) -> None:
    kv = VIEWS[name]
    token_ids = np.arange(2 * kv.shape[1], dtype=np.uint32)[::2]
    found = decode_segment(bytes(encode_segment(Segment(3, token_ids, kv), IDENTITY)))
    assert np.array_equal(found.kv, kv)
    assert np.array_equal(found.token_ids, token_ids)
    assert found.kv.flags.c_contiguous


def test_loading_copies_nothing_and_writing_holds_one_encoded_segment() -> None:
    kv = np.zeros((8, 100_000, 16), dtype=np.uint16)[:, 10_000:90_000]
    before = pa.total_allocated_bytes()
    data = encode_segment(Segment(0, np.zeros(80_000, np.uint32), kv), IDENTITY)
    assert pa.total_allocated_bytes() - before <= len(data) + 8192
    assert len(data) <= kv.nbytes + 4 * 80_000 + 2048
    found = decode_segment(whole := bytes(data))
    assert np.shares_memory(found.kv, np.frombuffer(whole, dtype=np.uint8))
    assert not found.kv.flags.writeable


PEAK = """
import sys
from pathlib import Path
import numpy as np
from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.checkpoints.kv_segments import Segment
from swiftbatch.jobs.storage.store import Store

def memory(kind):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))

checkpoints = CheckpointStore(Store(sys.argv[1]), "fp")
buffer = np.ones((16, 50_000, 64), np.uint16)
kv, token_ids = buffer[:, 10_000:42_000], np.arange(32_000, dtype=np.uint32)
entry = checkpoints.write_segment("job", 1, Segment(0, token_ids[:100], kv[:, :100]))
checkpoints.read_segment("job", entry)
for action in ("write", "read"):
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    if action == "write":
        entry = checkpoints.write_segment("job", 1, Segment(0, token_ids, kv))
    else:
        segment = checkpoints.read_segment("job", entry)
    print((memory("VmHWM") - before) / kv.nbytes)
"""


@pytest.mark.long
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc")
def test_a_segment_is_written_and_read_within_its_own_size(tmp_path: Path) -> None:
    script = [sys.executable, "-c", PEAK, str(tmp_path)]
    written, read = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert 0.9 < float(written) < 1.1
    assert 0.9 < float(read) < 1.1


@pytest.mark.parametrize(
    ("start", "token_ids", "kv", "problem"),
    [
        (-1, np.zeros(3, np.uint32), np.zeros((2, 3, 4), np.uint16), "expected a start of 0 or more"),
        (0, np.zeros(3, np.int64), np.zeros((2, 3, 4), np.uint16), r"found token ids of int64 \(3,\)"),
        (0, np.zeros(0, np.uint32), np.zeros((2, 0, 4), np.uint16), r"found token ids of uint32 \(0,\)"),
        (0, np.zeros(3, np.uint32), np.zeros((2, 4, 4), np.uint16), r"expected .* \[num_rows, 3, row_width\]"),
        (0, np.zeros(3, np.uint32), np.zeros((2, 3, 4), np.float64), "found KV of float64"),
        (0, np.zeros(3, np.uint32), np.zeros((3, 4), np.uint16), r"found KV of uint16 \(3, 4\)"),
        (0, np.zeros(3, np.uint32), np.zeros((2, 3, 4), ">u2"), "found KV of >u2"),
    ],
)
def test_arrays_that_make_no_segment_are_refused(
    start: int, token_ids: NDArray[Any], kv: NDArray[Any], problem: str
) -> None:
    with pytest.raises(TypeError, match=problem):
        encode_segment(Segment(start, token_ids, kv), IDENTITY)


def tensors(*arrays: NDArray[Any]) -> bytes:
    sink = pa.BufferOutputStream()
    for array in arrays:
        pa.ipc.write_tensor(pa.Tensor.from_numpy(array), sink)
    return bytes(sink.getvalue())


OWNER = np.frombuffer(IDENTITY.pack(), np.uint8)
TOKEN_IDS, KV = np.zeros(3, np.uint32), np.zeros((2, 3, 4), np.uint16)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "found no usable KV segment"),
        (b"SWTOKENS" + bytes(60), "found no usable KV segment"),
        (WHOLE[:-1], "found no usable KV segment"),
        (WHOLE + b"\0", f"found {len(WHOLE) + 1} bytes, expected {len(WHOLE)}"),
        (tensors(np.array([0]), OWNER), "found no usable KV segment"),
        (tensors(np.array([0, 0]), OWNER, TOKEN_IDS, KV), "expected its header first"),
        (tensors(np.array([-1]), OWNER, TOKEN_IDS, KV), "expected a start of 0 or more"),
        (tensors(np.array([0]), OWNER, TOKEN_IDS), "found no usable KV segment"),
        (tensors(np.array([0]), OWNER, TOKEN_IDS, KV[:, :2]), "found KV of uint16"),
    ],
)
def test_what_is_no_segment_is_told_in_one_line(data: bytes, problem: str) -> None:
    with pytest.raises(DamagedFileError, match=problem) as caught:
        decode_segment(data)
    assert "\n" not in str(caught.value)


@settings(max_examples=120)
@given(flips=st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(1, 255)), min_size=1, max_size=4))
def test_damaged_bytes_end_in_an_error_or_in_a_segment_that_can_be_read(flips: list[tuple[int, int]]) -> None:
    damaged = bytearray(WHOLE)
    for position, flip in flips:
        damaged[position] ^= flip
    try:
        found = decode_segment(bytes(damaged))
    except DamagedFileError:
        return
    # the manifest's checksum detects flipped numbers; here, reads must stay inside the file
    assert found.kv.nbytes + found.token_ids.nbytes <= len(WHOLE)
    found.kv.tobytes()


@pytest.mark.parametrize("num_rows", [6, 2**45])
@pytest.mark.parametrize("row_stride", [0, 56, 2])
def test_a_size_that_a_damaged_header_claims_is_not_believed(num_rows: int, row_stride: int) -> None:
    shape, strides = struct.pack("<q", 6), struct.pack("<qqq", 56, 8, 2)
    assert WHOLE.count(shape) == WHOLE.count(strides) == 1
    damaged = WHOLE.replace(shape, struct.pack("<q", num_rows)).replace(strides, struct.pack("<qqq", row_stride, 8, 2))
    if damaged != WHOLE:
        with pytest.raises(DamagedFileError):
            decode_segment(damaged)
