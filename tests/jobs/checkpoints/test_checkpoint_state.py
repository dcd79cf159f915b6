from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_st
from numpy.typing import NDArray
from pydantic import ValidationError

from swiftbatch.jobs.checkpoints.checkpoint_files import SegmentEntry, StateManifest, dump_file
from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.checkpoints.kv_segments import decode_state, encode_state
from swiftbatch.jobs.storage.store import Store
from tests.jobs.checkpoints.checkpoint_parts import IDENTITY, JOB, segment_of, write_state

ATTEMPTS = f"checkpoints/{JOB}"


ARRAYS = numpy_st.arrays(
    dtype=st.one_of(
        numpy_st.boolean_dtypes(),
        numpy_st.integer_dtypes(),
        numpy_st.unsigned_integer_dtypes(),
        numpy_st.floating_dtypes(),
    ),
    shape=numpy_st.array_shapes(min_dims=0, min_side=0, max_side=4),
)


@given(state=st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=10), ARRAYS, max_size=4))
def test_a_state_gives_back_its_arrays_bit_for_bit(state: dict[str, NDArray[Any]]) -> None:
    found = decode_state(encode_state(state, IDENTITY))
    assert list(found) == list(state)
    for name, array in state.items():
        assert found[name].dtype == array.dtype.newbyteorder("=")
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.astype(found[name].dtype).tobytes()
        assert found[name].flags.writeable


def test_a_drafter_state_that_would_need_pickling_is_refused(checkpoints: CheckpointStore) -> None:
    for wrong in (np.array([{}], dtype=object), np.array(["x"]), np.zeros(2, dtype=[("a", "i4")])):
        with pytest.raises(TypeError, match=r"state 'table': found dtype .*, expected plain numbers"):
            checkpoints.write_drafter(JOB, 1, 3, "suffix", {"table": wrong})


def test_writing_a_drafter_state_holds_one_encoded_copy() -> None:
    state = {"ids": np.zeros((100_000, 8), np.int32), "logprobs": np.zeros((100_000, 8), np.float32)}
    before = pa.total_allocated_bytes()
    data = encode_state(state, IDENTITY)
    assert pa.total_allocated_bytes() - before <= len(data) + 8192
    assert len(data) <= sum(array.nbytes for array in state.values()) + 4096


def test_a_manifest_names_what_was_written_and_it_is_read_back(store: Store, checkpoints: CheckpointStore) -> None:
    manifest = write_state(checkpoints, 1, [5, 8])
    assert [entry.file for entry in manifest.segments] == ["0001/kv-0-5.arrow", "0001/kv-5-8.arrow"]
    assert manifest.num_positions == 8
    assert checkpoints.read_manifests(JOB) == [manifest]
    for entry, expected in zip(manifest.segments, (segment_of(0, 5), segment_of(5, 8)), strict=True):
        assert entry.size == len(store.read(f"{ATTEMPTS}/{entry.file}") or b"")
        found = checkpoints.read_segment(JOB, entry)
        assert found.start == expected.start
        assert np.array_equal(found.token_ids, expected.token_ids)
        assert np.array_equal(found.kv, expected.kv)
    assert manifest.drafter.file == "0001/drafter-8.arrow"
    assert manifest.drafter.engine == "suffix"
    assert (checkpoints.read_drafter(JOB, manifest.drafter) or {})["table"].tolist() == list(range(8))


def test_a_later_attempt_s_manifest_goes_on_from_segments_of_an_earlier_one(checkpoints: CheckpointStore) -> None:
    first = write_state(checkpoints, 1, [5, 8])
    second = write_state(checkpoints, 2, [10], first.segments[:1])
    files = ["0001/kv-0-5.arrow", "0002/kv-5-10.arrow"]
    assert [entry.file for entry in second.segments] == files
    assert all(checkpoints.read_segment(JOB, entry) for entry in second.segments)


def test_manifests_come_with_most_positions_first_then_the_newest_attempt(checkpoints: CheckpointStore) -> None:
    assert checkpoints.read_manifests(JOB) == []
    ends = {1: 8, 2: 9, 3: 3, 4: 8}
    manifests = {attempt: write_state(checkpoints, attempt, [end]) for attempt, end in ends.items()}
    assert checkpoints.read_manifests(JOB) == [manifests[attempt] for attempt in (2, 4, 1, 3)]


def test_older_drafter_states_go_once_the_manifest_is_in_place_and_segments_stay(
    store: Store, checkpoints: CheckpointStore
) -> None:
    first = write_state(checkpoints, 1, [5])
    second = checkpoints.write_drafter(JOB, 1, 8, "suffix", {})
    assert checkpoints.read_drafter(JOB, first.drafter)
    write_state(checkpoints, 2, [4])
    write_state(checkpoints, 1, [9], first.segments, replaced=[first.drafter.file, second.file])
    assert store.list(f"{ATTEMPTS}/0001") == ["drafter-9.arrow", "kv-0-5.arrow", "kv-5-9.arrow", "manifest.json"]
    assert store.list(f"{ATTEMPTS}/0002") == ["drafter-4.arrow", "kv-0-4.arrow", "manifest.json"]


def entry_of(start: int, end: int, file: str | None = None) -> SegmentEntry:
    return SegmentEntry(file=file or f"0001/kv-{start}-{end}.arrow", start=start, end=end, size=9, sha256="0" * 64)


@pytest.mark.parametrize(
    "bounds",
    [[(1, 5)], [(0, 5), (6, 8)], [(0, 5), (4, 8)], [(0, 5), (0, 5)], [(5, 8), (0, 5)], [(0, 0)], [(0, 5), (5, 3)]],
)
def test_segments_that_leave_a_gap_or_overlap_make_no_manifest(bounds: list[tuple[int, int]]) -> None:
    with pytest.raises(ValidationError):
        StateManifest(segments=tuple(entry_of(*pair) for pair in bounds))


@pytest.mark.parametrize(
    "file",
    [
        "../0001/kv-0-5.arrow",
        "0001/../kv-0-5.arrow",
        "0001/kv-0-5.arrow/../../../run.json",
        "/0001/kv-0-5.arrow",
        "kv-0-5.arrow",
        "1/kv-0-5.arrow",
        "0001/kv-0-5.arrow\n",
        "0001/kv-0-6.arrow",
        "0001/kv-00-5.arrow",
        "\u0660\u0660\u0660\u0661/kv-0-5.arrow",
    ],
)
def test_no_file_name_in_a_manifest_leads_out_of_the_job_s_folder(file: str) -> None:
    with pytest.raises(ValidationError):
        entry_of(0, 5, file)


def test_a_whole_segment_of_other_positions_than_the_manifest_says_is_left_out(
    store: Store, checkpoints: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    (entry,) = write_state(checkpoints, 1, [5]).segments
    moved = entry.model_copy(update={"file": "0001/kv-3-8.arrow", "start": 3, "end": 8})
    store.write(f"{ATTEMPTS}/{moved.file}", store.read(f"{ATTEMPTS}/{entry.file}") or b"")
    assert checkpoints.read_segment(JOB, moved) is None
    assert f"{moved.file} in" in caplog.text
    assert "found the positions 0 to 5 in it" in caplog.text


@pytest.mark.parametrize(
    "text", [b"", b"[2]", b"{", b"null", b"\xff", b"[" * 100_000, b'{"num_rewinds": ' + b"9" * 5000 + b"}"]
)
def test_a_manifest_that_is_no_json_object_is_named_in_one_line(
    store: Store, checkpoints: CheckpointStore, caplog: pytest.LogCaptureFixture, text: bytes
) -> None:
    store.write(f"{ATTEMPTS}/0001/manifest.json", text)
    assert checkpoints.read_manifests(JOB) == []
    (record,) = caplog.records
    assert "0001/manifest.json" in record.getMessage()
    assert "\n" not in record.getMessage()
    assert len(record.getMessage()) < 400


def test_a_sealed_manifest_with_wrong_fields_is_named(
    store: Store, checkpoints: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    gap = StateManifest.model_construct(segments=(entry_of(3, 5),), drafter=None)
    store.write(f"{ATTEMPTS}/0001/manifest.json", dump_file(gap, IDENTITY))
    assert checkpoints.read_manifests(JOB) == []
    assert "found the segment 0001/kv-3-5.arrow, expected one that starts at 0" in caplog.text
