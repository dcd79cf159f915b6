"""A run's jobs without prompts, in about a hundred bytes each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from swiftbatch.jobs.run.job_table import lineages, read_parts, table_schema
from swiftbatch.jobs.storage.store import Store

if TYPE_CHECKING:
    import pyarrow as pa


COLUMNS = (
    *("job_id", "custom_id", "supersedes", "prompt_keys"),
    *("line_number", "num_prompt_tokens", "max_tokens", "choice_index", "num_choices"),
)
TEXTS = ("job_id", "custom_id")
SMALL = ("num_prompt_tokens", "max_tokens", "choice_index", "num_choices")
ROWS_AT_ONCE = 10_000


@dataclass(frozen=True, slots=True)
class JobEntry:
    """One job without its prompt; fields as in `Job` and `JobRecord`."""

    job_id: str
    custom_id: str
    line_number: int
    num_prompt_tokens: int
    max_tokens: int
    choice_index: int = 0
    num_choices: int = 1
    place: int = -1  # its row in all tables of the run, -1 if unknown

    @property
    def name(self) -> str:
        return self.custom_id if self.num_choices == 1 else f"{self.custom_id}[{self.choice_index}]"

    @property
    def max_length(self) -> int:
        return self.num_prompt_tokens + self.max_tokens


ENTRY = tuple(name for name in JobEntry.__dataclass_fields__ if name != "place")


class JobIndex:
    """Jobs in input order, a row of `columns` each; `places` are their rows in the run's tables.

    Text columns are Arrow arrays, numbers numpy's.
    """

    def __init__(self, columns: dict[str, Any], places: NDArray[np.int64]) -> None:
        self.columns = columns
        self.places = places

    def __len__(self) -> int:
        return len(self.places)

    @classmethod
    def of(cls, parts: Iterable[pa.Table], names: Sequence[str] = COLUMNS) -> Self:
        """Collect the latest version of each job; `names` must include `job_id` and `supersedes`."""
        import pyarrow as pa

        empty = table_schema().empty_table().select(names)
        table = pa.concat_tables([_narrowed(part) for part in (empty, *parts)]).combine_chunks()
        places = _newest(table)
        if len(places) < len(table):
            table = table.take(places).combine_chunks()
        return cls(_columns(table), places)

    def some(self, rows: NDArray[np.int64]) -> JobIndex:
        taken = {name: _taken(column, rows) for name, column in self.columns.items()}
        return JobIndex(taken, self.places[rows])

    def without(self, *names: str) -> JobIndex:
        """Drop columns to free their memory."""
        return JobIndex({name: each for name, each in self.columns.items() if name not in names}, self.places)

    @property
    def longest(self) -> int:
        return int(max(self.columns["num_prompt_tokens"] + self.columns["max_tokens"], default=0))

    def entry(self, row: int) -> JobEntry:
        fields: dict[str, Any] = {name: self.columns[name][row].as_py() for name in TEXTS}
        fields |= {name: int(self.columns[name][row]) for name in ENTRY[len(TEXTS) :]}
        return JobEntry(**fields, place=int(self.places[row]))

    def entries(self) -> Iterator[JobEntry]:
        for start in range(0, len(self), ROWS_AT_ONCE):
            some = slice(start, start + ROWS_AT_ONCE)
            fields: Any = [*(self.columns[name][some].tolist() for name in ENTRY), self.places[some].tolist()]
            yield from starmap(JobEntry, zip(*fields, strict=True))

    def job_ids(self) -> Iterator[str]:
        return self._texts("job_id")

    def custom_ids(self) -> Iterator[str]:
        return self._texts("custom_id")

    def _texts(self, name: str) -> Iterator[str]:
        for start in range(0, len(self), ROWS_AT_ONCE):
            yield from self.columns[name][start : start + ROWS_AT_ONCE].to_pylist()

    def rows_of(self, name: str, values: Iterable[str]) -> NDArray[np.int64]:
        import pyarrow as pa
        from pyarrow import compute

        column = self.columns[name]
        is_one = compute.is_in(column, value_set=pa.array(list(values), column.type))
        return np.flatnonzero(is_one.to_numpy(zero_copy_only=False)).astype(np.int64)


def _narrowed(part: pa.Table) -> pa.Table:
    import pyarrow as pa

    types = {name: pa.int32() for name in SMALL} | {name: pa.large_string() for name in (*TEXTS, "supersedes")}
    fields = [pa.field(field.name, types.get(field.name, field.type)) for field in part.schema]
    return part.cast(pa.schema(fields)).replace_schema_metadata(None)


def _columns(table: pa.Table) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name in table.column_names:
        column = table.column(name)
        chunk = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        is_number = name in SMALL or name == "line_number"
        columns[name] = chunk.to_numpy() if is_number else chunk
    return {name: column for name, column in columns.items() if name != "supersedes"}


def _taken(column: Any, rows: NDArray[np.int64]) -> Any:
    import pyarrow as pa

    return column[rows] if isinstance(column, np.ndarray) else column.take(pa.array(rows))


def _newest(table: pa.Table) -> NDArray[np.int64]:
    """Return the rows of each job's latest version, in input order."""
    from pyarrow import compute

    job_ids, supersedes = table.column("job_id"), table.column("supersedes")
    if supersedes.null_count == len(table) and compute.count_distinct(job_ids).as_py() == len(table):
        return np.arange(len(table), dtype=np.int64)
    ids = job_ids.to_pylist()
    first = {job_id: row for row, job_id in reversed(list(enumerate(ids)))}
    newest = (lineage[-1] for lineage in lineages(zip(ids, supersedes.to_pylist(), strict=True)))
    return np.fromiter((first[job_id] for job_id in newest), np.int64)


def job_entries(store: Store) -> Iterator[JobEntry]:
    """Yield the latest version of each of a run's jobs. Raises RunError, StoreError."""
    names = (*ENTRY, "supersedes")
    return JobIndex.of(read_parts(store, names), names).entries()
