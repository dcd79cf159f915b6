"""Rows of a Parquet file become jobs or rejects, in bounded memory."""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
import threading
import tracemalloc
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from swiftbatch.jobs.input.job_files import InputFileError
from swiftbatch.jobs.input.line_parsing import JobLine
from swiftbatch.jobs.input.parquet_rows import Columns, parquet_rows
from swiftbatch.jobs.input.reader import JobReader
from swiftbatch.jobs.input.rejects import Reject
from tests.jobs.input.job_lines import CHAT, read_jobs
from tests.work_counts import counted_calls

TEXTS = ["Once", "Twice", "Thrice"]
TABLE = {"custom_id": ["a", "b", "c"], "prompt": TEXTS, "max_tokens": [5, 6, None]}


def write(path: Path, columns: dict[str, Any]) -> Path:
    parquet.write_table(pa.table(columns), path, row_group_size=2)
    return path


def read(path: Path, *said: str) -> tuple[list[JobLine], list[Reject]]:
    reader = JobReader(1, Columns.parse(said))
    return [line for _, line in reader.lines(str(path), str(path))], list(reader.rejects)


def refused(path: Path, *said: str) -> str:
    with pytest.raises(InputFileError) as caught:
        read(path, *said)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_rows_are_the_jobs_that_the_same_lines_are_and_nulls_are_absent(tmp_path: Path) -> None:
    lines = [{name: column[row] for name, column in TABLE.items()} for row in range(3)]
    (tmp_path / "jobs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = write(tmp_path / "jobs.dat", TABLE)  # recognized by its first bytes, whatever its name
    assert read_jobs(str(path), 1) == read_jobs(str(tmp_path / "jobs.jsonl"), 1)


@pytest.mark.parametrize("column", ["prompt_token_ids", "ids"])
def test_token_ids_may_be_a_column(tmp_path: Path, column: str) -> None:
    ids = pa.array([[5, 6], [7]], pa.list_(pa.int32()))
    path = write(tmp_path / "ids.parquet", {"custom_id": ["a", "b"], column: ids})
    jobs, rejects = read(path, *(["prompt_token_ids=ids"] if column == "ids" else []))
    assert ([job.prompts for job in jobs], rejects) == ([((5, 6),), ((7,),)], [])


def test_a_mapped_column_of_token_ids_stands_for_any_other_text(tmp_path: Path) -> None:
    path = write(tmp_path / "ids.parquet", TABLE | {"ids": [[5], [6], [7]]})
    jobs, rejects = read(path, "prompt_token_ids=ids")
    assert ([job.prompts for job in jobs], rejects) == ([((5,),), ((6,),), ((7,),)], [])


def test_types_of_tables_are_those_of_lines(tmp_path: Path) -> None:
    columns = {
        "custom_id": np.array([7, 8]),
        "prompt": pa.array([b"Once", b"Twice"]),
        "max_tokens": np.array([5.0, 6.0]),  # as pandas stores whole numbers with gaps
        "temperature": np.array([0.8, 1.0], dtype=np.float32),
        "stop": pa.array([["END"], None]),
        "logit_bias": pa.array([[("17", 2.5)], None], pa.map_(pa.string(), pa.float64())),
        "seed": np.array([1, 2], dtype=np.uint8),
        "__index_level_0__": np.array([0, 1]),
    }
    (first, second), rejects = read(write(tmp_path / "jobs.parquet", columns))
    assert rejects == []
    assert (first.custom_id, first.prompts, first.max_tokens) == ("7", ("Once",), 5)
    assert (first.sampling["temperature"], first.sampling["stop"]) == (0.8, ("END",))
    assert dict(first.sampling["logit_bias"]) == {17: 2.5}
    assert (second.sampling["temperature"], second.sampling["seed"], second.max_tokens) == (1.0, 2, 6)


@pytest.mark.parametrize(
    ("seeds", "kind"),
    [([-(2**63), -1], pa.int64()), ([0, 2**64 - 1], pa.uint64()), ([-1, 2**64 - 1], pa.decimal128(20, 0))],
)
def test_seeds_of_tables_are_whole_64_bit_numbers_of_any_kind(tmp_path: Path, seeds: list[int], kind: Any) -> None:
    columns = {"custom_id": ["a", "b"], "prompt": TEXTS[:2], "seed": pa.array(seeds, kind)}
    lines, rejects = read(write(tmp_path / "jobs.parquet", columns))
    assert (rejects, [line.sampling["seed"] for line in lines]) == ([], seeds)


def test_a_map_with_a_key_twice_is_a_reject_in_plain_words(tmp_path: Path) -> None:
    maps = pa.array([[("17", 2.5), ("17", 2.5)], [("17", 2.5)]], pa.map_(pa.string(), pa.float64()))
    columns = {"custom_id": ["a", "b"], "prompt": TEXTS[:2], "logit_bias": maps}
    [line], [reject] = read(write(tmp_path / "jobs.parquet", columns))
    assert (line.custom_id, reject.line_number) == ("b", 1)
    assert reject.reason == "found a key twice in a map, expected each once"


def test_decimals_are_the_numbers_that_they_are(tmp_path: Path) -> None:
    columns = {
        "custom_id": pa.array([7, 8], pa.decimal128(38, 0)),
        "prompt": TEXTS[:2],
        "max_tokens": pa.array([Decimal("5.00"), Decimal("5.50")]),
        "temperature": pa.array([Decimal("0.80"), Decimal("1.00")]),
    }
    [line], [reject] = read(write(tmp_path / "jobs.parquet", columns))
    assert (line.custom_id, line.max_tokens, line.sampling["temperature"]) == ("7", 5, 0.8)
    assert reject.reason == "field 'max_tokens': found 5.5, expected a whole number"


def test_a_struct_says_what_is_not_null_in_it(tmp_path: Path) -> None:
    bias = pa.array([{"17": 2.5, "18": None}, {"17": None, "18": -1.0}])
    columns = {"custom_id": ["a", "b"], "prompt": TEXTS[:2], "logit_bias": bias}
    lines, rejects = read(write(tmp_path / "jobs.parquet", columns))
    assert rejects == []
    assert [dict(line.sampling["logit_bias"]) for line in lines] == [{17: 2.5}, {18: -1.0}]


def test_messages_and_bodies_are_structs_or_json(tmp_path: Path) -> None:
    chats = [CHAT["messages"], [{"role": "assistant", "content": None, "name": "Ann"}, *CHAT["messages"]]]
    # all structs of a column share their fields: `weight` is no message field, and null in each
    structs = pa.array(
        chats, pa.list_(pa.struct({name: pa.string() for name in ("role", "content", "name", "weight")}))
    )
    text = pa.array([json.dumps(chat) for chat in chats])
    ids = {"custom_id": ["a", "b"], "max_tokens": [5, 5]}
    as_structs, rejects = read(write(tmp_path / "structs.parquet", ids | {"messages": structs}))
    as_text, _ = read(write(tmp_path / "text.parquet", ids | {"messages": text}))
    assert rejects == []
    assert as_structs == as_text
    assert as_structs[1].messages[0].name == "Ann"
    bodies = [{"prompt": "Once", "max_tokens": 5, "stop": None}, {"prompt": "Twice", "max_tokens": None, "stop": "END"}]
    head = {"custom_id": ["a", "b"], "method": ["POST"] * 2, "url": ["/v1/completions"] * 2}
    found = [
        read(write(tmp_path / "bodies.parquet", head | {"body": column}))
        for column in (pa.array(bodies), pa.array([json.dumps(body) for body in bodies]))
    ]
    assert found[0] == found[1]
    assert [(line.prompts, line.sampling["stop"]) for line in found[0][0]] == [(("Once",), ()), (("Twice",), ("END",))]


def test_wrong_values_are_rejects_with_the_number_of_their_row(tmp_path: Path) -> None:
    columns = {
        "custom_id": ["a", "b", "c", None, "e", "a"],
        "prompt": pa.array([b"Once", b"\xff", b"Once", b"Once", None, b"Once"]).cast(pa.binary()),
        "max_tokens": [5.0, 5.0, 5.5, 5.0, 5.0, 5.0],
    }
    for kind in (pa.binary(), pa.string()):
        columns["prompt"] = columns["prompt"].view(kind)
        lines, rejects = read(write(tmp_path / "jobs.parquet", columns))
        assert [line.custom_id for line in lines] == ["a", "jobs.parquet:4"]
        assert [reject.line_number for reject in rejects] == [2, 3, 5, 6]
        reasons = [reject.reason for reject in rejects]
        assert "not UTF-8: found 0xff" in reasons[0]
        assert reasons[1].startswith("field 'max_tokens': found 5.5")
        assert reasons[2].startswith("fields 'prompt' and 'messages': found neither")
        assert reasons[3].endswith("(first in line 1), expected it once")
    lines, rejects = read(write(tmp_path / "jobs.parquet", {"custom_id": ["a"], "messages": ["{torn"]}))
    assert rejects[0].reason.startswith("field 'messages': not JSON")
    assert rejects[0].reason.endswith("expected one object in the column")


def test_rows_without_custom_ids_are_named_by_file_and_row_alone_or_among_others(tmp_path: Path) -> None:
    path = write(tmp_path / "part-0.parquet", {"prompt": TEXTS})
    assert [line.custom_id for line in read(path)[0]] == ["part-0.parquet:1", "part-0.parquet:2", "part-0.parquet:3"]


def test_unknown_columns_are_refused_unless_columns_are_named_and_then_told_of(tmp_path: Path) -> None:
    data = {"id": [1, 2], "text": TEXTS[:2], "label": [0, 1], "url": ["x", "y"], "prompt": ["-", "-"], "seed": [3, 4]}
    path = write(tmp_path / "data.parquet", data)
    line = refused(path)
    assert 'unknown columns "id", "text", "label", expected some of: custom_id, prompt' in line
    lines, rejects = read(path, "prompt=text", "custom_id=id")
    assert rejects == []
    assert [(line.custom_id, line.prompts, line.sampling["seed"]) for line in lines] == [
        ("1", ("Once",), 3),
        ("2", ("Twice",), 4),
    ]
    assert [line.without_effect for line in lines] == [("label", "url", "prompt")] * 2
    line = refused(path, "prompt=txt")
    assert 'found no column for --column prompt=txt; its columns are: "id", "text", "label"' in line


def test_an_empty_table_and_an_empty_or_foreign_file_hold_no_jobs(tmp_path: Path) -> None:
    path = write(tmp_path / "jobs.parquet", {"prompt": pa.array([], pa.string())})
    with pytest.raises(InputFileError, match=r"holds no jobs: found no row and no line with text"):
        read_jobs(str(path), 1)
    for data, found in ((b"", "an empty file"), (b'{"a": 1}\n', "other first bytes than Parquet's")):
        path.write_bytes(data)
        assert f"jobs.parquet: found {found}; expected a Parquet file" in refused(path)


@pytest.mark.parametrize("is_packed", [False, True])
def test_standard_input_a_pipe_and_a_compressed_file_may_hold_parquet(
    tmp_path: Path, is_packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = write(tmp_path / "whole", TABLE)
    expected = read_jobs(str(whole), 1)
    data = gzip.compress(whole.read_bytes()) if is_packed else whole.read_bytes()
    (tmp_path / "file").write_bytes(data)
    assert read_jobs(str(tmp_path / "file"), 1) == expected
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert read_jobs("-", 1) == expected
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(data), daemon=True)
    writer.start()
    assert read_jobs(str(pipe), 1) == expected
    writer.join()


@settings(max_examples=30)
@given(data=st.data())
def test_data_that_is_cut_off_or_damaged_is_refused_in_one_line_or_read(tmp_path: Path, data: st.DataObject) -> None:
    whole = write(tmp_path / "whole", TABLE | {"messages": [None, [], None]}).read_bytes()
    path = tmp_path / "jobs.parquet"
    path.write_bytes(whole[: data.draw(st.integers(4, len(whole) - 1))])
    assert "jobs.parquet: its Parquet data is damaged or cut off: " in refused(path)
    position = data.draw(st.integers(4, len(whole) - 1))
    path.write_bytes(
        whole[:position] + bytes([whole[position] ^ data.draw(st.integers(1, 255))]) + whole[position + 1 :]
    )
    with suppress(InputFileError):
        read(path)


@pytest.mark.long
def test_a_long_column_is_read_a_piece_at_a_time(tmp_path: Path) -> None:
    texts = pa.array([os.urandom(500).hex() for _ in range(40_000)])
    parquet.write_table(pa.table({"prompt": texts}), tmp_path / "x", compression="none", use_dictionary=False)
    num_bytes = (tmp_path / "x").stat().st_size
    tracemalloc.start()
    try:
        with (tmp_path / "x").open("rb") as file:
            assert sum(1 for _ in parquet_rows(file, "x", Columns())) == len(texts)
        assert tracemalloc.get_traced_memory()[1] < num_bytes / 4
    finally:
        tracemalloc.stop()


def test_a_row_is_as_much_work_among_many_as_among_few(tmp_path: Path) -> None:
    num_calls = []
    for num_rows in (500, 10_000):
        names = [f"row {number}" for number in range(num_rows)]
        path = write_large(tmp_path / f"{num_rows}.parquet", {"id": names, "text": names, "label": names})
        with counted_calls() as work:
            lines, rejects = read(path, "prompt=text", "custom_id=id")
        assert (len(lines), rejects) == (num_rows, [])
        assert lines[-1].prompts == (names[-1],)
        num_calls.append(work.num_calls / num_rows)
    few, many = num_calls
    assert many < 1.2 * few


def write_large(path: Path, columns: dict[str, Any]) -> Path:
    parquet.write_table(pa.table(columns), path)
    return path


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1, max_size=5), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.long
@settings(max_examples=25)
@given(
    value=VALUES, name=st.sampled_from(["custom_id", "prompt", "messages", "body", "max_tokens", "seed", "logit_bias"])
)
def test_whatever_a_column_holds_every_row_is_a_job_or_a_reject(tmp_path: Path, value: Any, name: str) -> None:
    try:
        column = pa.array([value, None])
        path = write(tmp_path / "jobs.parquet", {"custom_id": ["a", "b"], "prompt": ["x", "y"]} | {name: column})
    except (pa.ArrowException, UnicodeEncodeError, OverflowError):
        return  # no table holds it
    lines, rejects = read(path)
    assert len(lines) + len(rejects) == 2
    assert all("\n" not in reject.reason for reject in rejects)
