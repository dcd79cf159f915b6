from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from swiftbatch.jobs.errors import UserError
from swiftbatch.scheduler.api.table_files import write_parquet

TEXT = pa.string_view()
TYPES = {  # as polars gives them
    "prompt": TEXT,
    "messages": pa.large_list(pa.struct([("role", TEXT), ("content", TEXT)])),
    "stop": pa.list_(TEXT, 1),
    "kind": pa.dictionary(pa.uint32(), TEXT),
    "data": pa.binary_view(),
    "ids": pa.large_list(pa.int64()),
}
ROWS: list[dict[str, Any]] = [
    {
        "prompt": None,
        "messages": [{"role": "user", "content": "Hi"}],
        "stop": ["x"],
        "kind": "q",
        "data": b"1",
        "ids": [1],
    },
    {"prompt": "a", "messages": None, "stop": None, "kind": None, "data": None, "ids": [2, 3]},
]


class Polars:
    """A table that only has Arrow's interface, in several pieces."""

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        values = {name: [row[name] for row in ROWS] for name in TYPES}
        kind = pa.DictionaryArray.from_arrays(pa.array([0, None], pa.uint32()), pa.array(["q"], TEXT))
        columns = {name: kind if name == "kind" else pa.array(values[name], TYPES[name]) for name in TYPES}
        return pa.table(columns).__arrow_c_stream__(requested_schema)


def test_a_table_with_views_of_texts_is_written(tmp_path: Path) -> None:
    write_parquet(Polars(), str(tmp_path / "jobs.parquet"))
    assert parquet.read_table(tmp_path / "jobs.parquet").to_pylist() == ROWS


def test_an_index_of_pandas_is_no_column(tmp_path: Path) -> None:
    write_parquet(pa.table({"prompt": ["a"], "__index_level_0__": [0]}), str(tmp_path / "jobs.parquet"))
    assert parquet.read_table(tmp_path / "jobs.parquet").column_names == ["prompt"]


def test_a_table_that_no_file_takes_is_refused_in_a_line(tmp_path: Path) -> None:
    union = pa.UnionArray.from_dense(pa.array([0], pa.int8()), pa.array([0], pa.int32()), [pa.array([1])])
    with pytest.raises(UserError, match=r"the table cannot become a Parquet file: .*; give dicts in its place"):
        write_parquet(pa.table({"prompt": union}), str(tmp_path / "jobs.parquet"))
