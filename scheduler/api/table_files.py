"""Tables of Python programs as Parquet files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swiftbatch.jobs.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa


def write_parquet(jobs: Any, path: str) -> None:
    """Write a table of any library that Arrow reads. Raises UserError."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        table = pa.table(jobs)
        index = [name for name in table.column_names if name.startswith("__index_level_")]  # of a pandas table
        table = table.drop_columns(index)
        written = table.cast(pa.schema([field.with_type(_without_views(field.type)) for field in table.schema]))
        parquet.write_table(written, path)
    except pa.ArrowException as error:
        problem = " ".join(str(error).split())
        raise UserError(
            f"submit(): the table cannot become a Parquet file: {problem}; give dicts in its place"
        ) from None


def _without_views(kind: pa.DataType) -> pa.DataType:
    """Return a type without views of texts, as polars has them, since no Parquet file takes them within lists."""
    import pyarrow as pa

    if kind in (pa.string_view(), pa.binary_view()):
        return pa.large_string() if kind == pa.string_view() else pa.large_binary()
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _without_views(kind.value_type), kind.ordered)
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_without_views(field.type)) for field in kind])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.large_list(_without_views(kind.value_type))
    return kind
