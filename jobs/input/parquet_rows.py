"""Parquet rows as line objects, by `--column FIELD=COLUMN` and column names."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import IO, Any
from uuid import UUID

from swiftbatch.jobs.errors import LineError, UserError
from swiftbatch.jobs.input.job_files import InputFileError
from swiftbatch.jobs.input.line_parsing import parse_json
from swiftbatch.jobs.input.request_fields import BatchLine, ShortLine, is_of_others
from swiftbatch.jobs.json_records import shown

FIELDS = tuple(dict.fromkeys(["custom_id", "prompt", "messages", *ShortLine.model_fields, *BatchLine.model_fields]))
SHORT_TEXTS = {"prompt", "prompt_token_ids", "messages"}
BATCH = {"method", "url", "body"}


class ColumnError(UserError):
    """A wrong or missing column."""


@dataclass(frozen=True)
class Columns:
    """The columns that `--column` maps to fields."""

    by_field: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, said: Iterable[str]) -> Columns:
        """Parse `FIELD=COLUMN` arguments. Raises ColumnError."""
        by_field: dict[str, str] = {}
        for text in said:
            name, _, column = text.partition("=")
            if not name or not column:
                raise ColumnError(f"found {shown(text)}, expected FIELD=COLUMN, as in prompt=text")
            if name not in FIELDS:
                raise ColumnError(f"unknown field {shown(name)}, expected one of: {', '.join(FIELDS)}")
            if name in by_field:
                raise ColumnError(f"found two columns for the field {shown(name)}, expected one")
            by_field[name] = column
        return cls(by_field)

    def chosen(self, names: Collection[str]) -> tuple[list[tuple[str, str]], tuple[str, ...]]:
        """Return (field, column) pairs to read, and the names of ignored columns.

        If a mapping sets the text or the form of the lines, columns for other texts and forms are ignored.
        """
        if not self.by_field:
            return [(name, name) for name in names], ()
        pairs = [(name, column) for name, column in self.by_field.items() if column in names]
        pairs += [(name, name) for name in names if name in FIELDS and name not in self._settled()]
        used = {column for _, column in pairs}
        return pairs, tuple(name for name in names if name not in used)

    def applied(self, values: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return a line's fields and ignored names. Raises LineError if a mapped `custom_id` or text is missing."""
        if not self.by_field:
            return values, ()
        for needed in ({"custom_id"}, SHORT_TEXTS | BATCH):
            said = [name for name in self.by_field if name in needed]
            if said and not any(self.by_field[name] in values for name in said):
                column = self.by_field[said[0]]
                problem = f"found nothing, expected the {said[0]} as --column says"
                raise LineError(f"field {shown(column)}: {problem}", "missing_required_parameter")
        pairs, passed_over = self.chosen(values.keys())
        return {name: values[column] for name, column in pairs}, passed_over

    def absent(self, names: Collection[str]) -> list[str]:
        return [f"{name}={column}" for name, column in self.by_field.items() if column not in names]

    def _settled(self) -> set[str]:
        settled = set(self.by_field)
        if settled & SHORT_TEXTS:
            return settled | SHORT_TEXTS | BATCH
        return settled | SHORT_TEXTS if settled & BATCH else settled


MAGIC = b"PAR1"
NUM_ROWS_AT_ONCE = 256
BUFFER_BYTES = 2**20  # bytes per column; without a buffer a whole row group's column is read at once
# fields whose column may hold JSON text
OBJECTS = (
    *("messages", "body", "logit_bias", "chat_template_kwargs", "response_format", "structured_outputs"),
    *("repetition_detection", "tools"),
)
INDEX = re.compile(r"__index_level_[0-9]+__")  # the index column that pandas adds

Row = tuple[int, dict[str, Any] | LineError, tuple[str, ...]]
"""The number of a row (from 1), its fields or what is wrong with it, and the columns that were passed over."""


def parquet_rows(file: IO[bytes], name: str, columns: Columns) -> Iterator[Row]:
    """Yield the rows of a seekable file; `FILE:ROW` replaces a missing `custom_id`.

    Raises InputFileError, also while reading.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        # without threads: pyarrow's may still start when a refused command ends, and abort the process
        source = parquet.ParquetFile(file, pre_buffer=False, buffer_size=BUFFER_BYTES)
        pairs, passed_over = _chosen(source.schema_arrow.names, name, columns)
        short = {column for _, column in pairs if _is_short_float(source.schema_arrow.field(column).type)}
        names = sorted({column for _, column in pairs})
        number = 0
        for batch in source.iter_batches(NUM_ROWS_AT_ONCE, columns=names, use_threads=False):
            for values in _objects(batch):
                number += 1
                if isinstance(values, dict):
                    values = _fields(values, pairs, short, f"{os.path.basename(name)}:{number}")
                yield number, values, passed_over
    except (pa.ArrowException, OSError, ValueError, KeyError, OverflowError, MemoryError) as error:
        if isinstance(error, InputFileError):
            raise
        problem = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputFileError(
            f"cannot read the job file {name}: its Parquet data is damaged or cut off: {problem}"
        ) from None


def _chosen(names: list[str], name: str, columns: Columns) -> tuple[list[tuple[str, str]], tuple[str, ...]]:
    """Raise InputFileError."""
    names = [column for column in names if not INDEX.fullmatch(column)]
    found = f"its columns are: {', '.join(map(shown, names))}"
    twice = sorted({column for column in names if names.count(column) > 1})
    if twice:
        raise InputFileError(f"cannot read the job file {name}: found two columns {shown(twice[0])}; {found}")
    if absent := columns.absent(names):
        raise InputFileError(f"cannot read the job file {name}: found no column for --column {absent[0]}; {found}")
    pairs, passed_over = columns.chosen(names)
    unknown = [column for field, column in pairs if field not in FIELDS and not is_of_others(field)]
    if unknown:
        raise InputFileError(
            f"cannot read the job file {name}: unknown columns {', '.join(map(shown, unknown))}, expected some of: "
            f"{', '.join(FIELDS)}; with --column, as in --column prompt={unknown[0]}, others are passed over"
        )
    return pairs, passed_over


def _objects(batch: Any) -> Iterator[dict[str, Any] | LineError]:
    """Yield a batch's rows, or LineErrors for those Python can't represent."""
    try:
        yield from batch.to_pylist(maps_as_pydicts="strict")
        return
    except (UnicodeDecodeError, KeyError, ValueError, OverflowError):
        pass  # a row is bad: find it
    for index in range(batch.num_rows):
        try:
            [row] = batch.slice(index, 1).to_pylist(maps_as_pydicts="strict")
            yield row
        except UnicodeDecodeError as error:
            yield LineError(f"not UTF-8: found 0x{error.object[error.start]:02x} in a text, expected UTF-8 text")
        except KeyError:  # a map has a key twice: only maps are read strictly
            yield LineError("found a key twice in a map, expected each once")
        except (ValueError, OverflowError) as error:
            yield LineError(f"not readable: {' '.join(str(error).split())}")


def _fields(
    values: dict[str, Any], pairs: list[tuple[str, str]], short: set[str], custom_id: str
) -> dict[str, Any] | LineError:
    try:
        fields = {name: _value(name, values[column], column in short) for name, column in pairs}
    except LineError as error:
        return error
    if not any(name == "custom_id" for name, _ in pairs):
        fields["custom_id"] = custom_id.encode(errors="backslashreplace").decode()
    return {name: value for name, value in fields.items() if value is not None}


def _value(name: str, value: Any, is_short: bool) -> Any:
    """Raise LineError."""
    if value is not None and is_short:
        import numpy as np  # opening a run should not import it

        value = float(str(np.float32(value)))  # 0.8 as written, not 0.800000011920929
    plain = _plain(value)
    if name in OBJECTS and isinstance(plain, str):
        try:
            return parse_json(plain)
        except LineError as error:
            raise LineError(f"field '{name}': {str(error).replace('on the line', 'in the column')}") from None
    return plain


def _plain(value: Any) -> Any:
    """Convert whole floats, bytes, decimals and UUIDs, which databases write."""
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        # all structs of a column share their fields, so a null means absent, except for a message's text
        return {name: _plain(each) for name, each in value.items() if each is not None or name == "content"}
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise LineError(f"not UTF-8: found 0x{value[error.start]:02x} in a text, expected UTF-8 text") from None
    return value


def _is_short_float(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_float32(kind) or pa.types.is_float16(kind))
