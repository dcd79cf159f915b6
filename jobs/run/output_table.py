"""Results as rows: `output.parquet`, and what `results` writes in other formats."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, Literal

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.json_records import dump_line
from swiftbatch.jobs.run.table_rows import COLUMNS, KeptColumns, Row, arrow_schema, conversation, row_groups, row_of
from swiftbatch.jobs.storage.store import StoreError, new_spool, spool

METRIC_COLUMNS: dict[str, str] = {  # columns of every table, even without results
    **dict.fromkeys(["distinct_1", "distinct_2", "distinct_3", "distinct_4"], "float64"),
    **dict.fromkeys(["mean_acceptance_length", "ms_per_token"], "float64"),
    **dict.fromkeys(["num_accepted_tokens", "num_attempts", "num_draft_tokens", "num_drafts"], "int64"),
    **dict.fromkeys(["num_recomputed_tokens", "num_recovered_tokens", "num_resumes"], "int64"),
    **dict.fromkeys(["num_rewinds", "num_rewound_tokens"], "int64"),
}
OWN_COLUMNS = {name: kind for name, kind in COLUMNS.items() if name != "revision"}
CHAT_FIELDS = ("messages", "tools")

ResultFormat = Literal["jsonl", "parquet", "chat"]
EndedLine = Sequence[tuple[JobRecord, dict[str, Any]]]
"""The choices of an input line, each with its own output line."""


@contextmanager
def table_file(
    lines: Iterable[EndedLine], kind: ResultFormat = "parquet", fields: Sequence[str] | None = None
) -> Iterator[tuple[BinaryIO, int]]:
    """Yield a file with a row for each choice and how many choices were left out: in a chat, those without an answer.

    Rows have all columns or these `fields`. Raises `StoreError`, and UserError for an unknown field.
    """
    with new_spool() as file:  # without `told_of_room`, since what the block does may fail in other ways
        with spool() as rows:
            table = OutputTable(rows, lines, _chat_row if kind == "chat" else _row)
            table.check(fields or (), CHAT_FIELDS if kind == "chat" else ())
            if kind == "parquet":
                table.write_parquet(file, fields)
            else:
                table.write_jsonl(file, fields)
        file.seek(0)
        yield file, table.num_left_out


def _row(record: JobRecord, line: dict[str, Any]) -> Row:
    row = row_of(record, line)
    if line["error"] is not None:
        return row
    metrics = line["response"]["body"]["metrics"].items()
    return {name: value for name, value in metrics if type(value) in (int, float) and name not in COLUMNS} | row


def _chat_row(record: JobRecord, line: dict[str, Any]) -> Row | None:
    found = conversation(record, line)
    return None if found is None else _row(record, line) | found


class OutputTable:
    """Rows of results on a disk, and the columns that they need."""

    def __init__(
        self,
        file: BinaryIO,
        lines: Iterable[EndedLine],
        make: Callable[[JobRecord, dict[str, Any]], Row | None] = _row,
    ) -> None:
        """Write the row that `make` returns for each choice into `file`; it leaves out those without one."""
        self._file, self.num_left_out = file, 0
        self._metrics, self._kept = dict(METRIC_COLUMNS), KeptColumns({*OWN_COLUMNS, *METRIC_COLUMNS, *CHAT_FIELDS})
        for line in lines:
            for record, own in line:
                row = make(record, own)
                if row is None:
                    self.num_left_out += 1
                    continue
                self._note(row, record.kept)
                said = {name: value for name, value in row.items() if value is not None}
                file.write(dump_line({"row": said, "kept": record.kept}))

    def _note(self, row: Row, kept: str | None) -> None:
        """Learn the types of metrics; a single float value makes a column float."""
        self._kept.note(kept)
        for name, value in row.items():
            if name not in COLUMNS and name not in CHAT_FIELDS and self._metrics.get(name) != "float64":
                self._metrics[name] = "float64" if isinstance(value, float) else "int64"

    def columns(self) -> dict[str, str]:
        return {**OWN_COLUMNS, **dict(sorted(self._metrics.items())), **self._kept.columns()}

    def check(self, fields: Iterable[str], others: Iterable[str] = ()) -> None:
        """Raise UserError for a field that is no column and none of the `others`."""
        known = dict.fromkeys([*self.columns(), *others])
        for name in fields:
            if name not in known:
                raise UserError(f"--fields: found {name!a}, expected some of: {', '.join(known)}")

    def rows(self) -> Iterator[Row]:
        self._file.seek(0)
        for line in self._file:
            read = json.loads(line)
            yield read["row"] | self._kept.values(read["kept"])

    def write_jsonl(self, target: BinaryIO, fields: Sequence[str] | None) -> None:
        """Write these fields of each row, or what a chat has."""
        for row in self.rows():
            if fields is None:
                said = {name: row[name] for name in CHAT_FIELDS if name in row}
            else:
                said = {name: row.get(name) for name in fields}
            target.write(dump_line(said))

    def write_parquet(self, target: BinaryIO, fields: Sequence[str] | None = None) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        columns = self.columns()
        schema = arrow_schema({name: columns[name] for name in fields or columns})
        with parquet.ParquetWriter(target, schema) as writer:
            for group in row_groups(self.rows()):
                try:
                    part = pa.Table.from_pylist(group, schema=schema)
                except (pa.ArrowException, OverflowError) as error:
                    first, last = group[0]["custom_id"], group[-1]["custom_id"]
                    problem = f"the results of {first} to {last} have a number that fits no column: {error}"
                    raise StoreError(f"{problem}; output.jsonl has them as they are") from None
                writer.write_table(part)
