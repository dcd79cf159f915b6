"""A shard as a file: Parquet with zstd, or JSON lines, written row by row in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, BinaryIO

from swiftbatch.jobs.input.json_lines import dump_line
from swiftbatch.jobs.run.output import row_groups
from swiftbatch.jobs.shards.rows import COLUMNS, MESSAGE, Row
from swiftbatch.jobs.shards.settings import ShardFormat

if TYPE_CHECKING:
    import pyarrow as pa

ROWS_PER_GROUP = 1000


def write_shard(target: BinaryIO, kind: ShardFormat, rows: Iterable[Row]) -> None:
    """Write all rows. The same rows make the same bytes."""
    if kind == "parquet":
        _write_parquet(target, rows)
        return
    for row in rows:
        target.write(dump_line({name: row[name] for name in COLUMNS}))


def arrow_schema() -> pa.Schema:
    """The columns, all of which may be null."""
    import pyarrow as pa

    kinds = {
        "string": pa.string(),
        "int64": pa.int64(),
        "float64": pa.float64(),
        "list of int64": pa.list_(pa.int64()),
        "list of messages": pa.list_(pa.struct([(name, pa.string()) for name in MESSAGE])),
    }
    return pa.schema([(name, kinds[kind]) for name, kind in COLUMNS.items()])


def _write_parquet(target: BinaryIO, rows: Iterable[Row]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    schema = arrow_schema()
    with parquet.ParquetWriter(target, schema, compression="zstd") as writer:
        for group in row_groups(rows, ROWS_PER_GROUP):
            writer.write_table(pa.Table.from_pylist(group, schema=schema), row_group_size=len(group))
