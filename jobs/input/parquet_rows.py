"""Parquet rows as line objects, by `--column FIELD=COLUMN` and column names."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from decimal import Decimal
from typing import IO, Any
from uuid import UUID

from swiftbatch.jobs.errors import LineError, UserError
from swiftbatch.jobs.input.job_files import InputFileError, line_name
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
    """The columns that `--column` maps to fields; `keeps_others` takes those that are no field along."""

    by_field: Mapping[str, str] = field(default_factory=dict)
    keeps_others: bool = False

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
        """Return (field, column) pairs to read, and the names of other columns.

        If a mapping sets the text or the form of the lines, columns for other texts and forms are no fields.
        """
        if not self.by_field and not self.keeps_others:
            return [(name, name) for name in names], ()
        pairs = [(name, column) for name, column in self.by_field.items() if column in names]
        pairs += [(name, name) for name in names if self._is_field(name) and name not in self._settled()]
        used = {column for _, column in pairs}
        return pairs, tuple(name for name in names if name not in used)

    def _is_field(self, name: str) -> bool:
        return name in FIELDS or (not self.by_field and is_of_others(name))

    def applied(self, values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a line's fields and its others. Raises LineError if a mapped `custom_id` or text is missing."""
        if not self.by_field and not self.keeps_others:
            return values, {}
        for needed in ({"custom_id"}, SHORT_TEXTS | BATCH):
            said = [name for name in self.by_field if name in needed]
            if said and not any(self.by_field[name] in values for name in said):
                column = self.by_field[said[0]]
                problem = f"found nothing, expected the {said[0]} as --column says"
                raise LineError(f"field {shown(column)}: {problem}", "missing_required_parameter")
        pairs, others = self.chosen(values.keys())
        return {name: values[column] for name, column in pairs}, {
            name: values[name] if self.keeps_others else ... for name in others
        }

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

Row = tuple[int, dict[str, Any] | LineError, Mapping[str, Any]]
"""The number of a row (from 1), its fields or what is wrong with it, and its columns that are no field.

A column that is not kept has the value `...`.
"""


def parquet_rows(file: IO[bytes], name: str, columns: Columns) -> Iterator[Row]:
    """Yield the rows of a seekable file; `FILE:ROW` replaces a missing `custom_id`.

    Raises InputFileError, also while reading.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        # without threads: pyarrow's may still start when a refused command ends, and abort the process
        source = parquet.ParquetFile(file, pre_buffer=False, buffer_size=BUFFER_BYTES)
        types = {column.name: column.type for column in source.schema_arrow}
        pairs, others = _chosen(source.schema_arrow.names, name, columns)
        kept = [each for each in others if columns.keeps_others and not _holds_bytes(types[each])]
        short = {column for column, kind in types.items() if _is_short_float(kind)}
        short_items = {column for column, kind in types.items() if _is_short_float(_item_type(kind))}
        names = sorted({*kept, *(column for _, column in pairs)})
        number = 0
        for batch in source.iter_batches(NUM_ROWS_AT_ONCE, columns=names, use_threads=False):
            for values in _objects(_in_microseconds(batch)):
                number += 1
                rest = dict.fromkeys(others, ...)
                if isinstance(values, dict):
                    rest |= {each: _kept(values[each], each in short_items) for each in kept}
                    values = _fields(values, pairs, short, line_name(name, number))
                yield number, values, rest
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
    pairs, others = columns.chosen(names)
    unknown = [column for field, column in pairs if field not in FIELDS and not is_of_others(field)]
    if unknown:
        raise InputFileError(
            f"cannot read the job file {name}: unknown columns {', '.join(map(shown, unknown))}, expected some of: "
            f"{', '.join(FIELDS)}; with --column, as in --column prompt={unknown[0]}, others are passed over; "
            "--keep-columns takes them along"
        )
    return pairs, others


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
        fields["custom_id"] = custom_id
    return {name: value for name, value in fields.items() if value is not None}


def _value(name: str, value: Any, is_short: bool) -> Any:
    """Raise LineError."""
    plain = _plain(_as_written(value) if is_short else value)
    if name in OBJECTS and isinstance(plain, str):
        try:
            return parse_json(plain)
        except LineError as error:
            raise LineError(f"field '{name}': {str(error).replace('on the line', 'in the column')}") from None
    return plain


def _as_written(value: float | None) -> float | None:
    """Return 0.8 for the float32 0.800000011920929."""
    import numpy as np  # opening a run should not import it

    return None if value is None else float(str(np.float32(value)))


def _kept(value: Any, is_short: bool = False) -> Any:
    """Return a value of a kept column as JSON has it.

    Times become texts, durations seconds, decimals texts with all digits, and numbers that are not finite null.
    """
    if isinstance(value, float):
        value = _as_written(value) if is_short else value
        return value if math.isfinite(value) else None
    if isinstance(value, str | int | bool | None):
        return value
    if isinstance(value, list):
        return [_kept(each, is_short) for each in value]
    if isinstance(value, dict):
        return {name: _kept(each) for name, each in value.items()}
    if isinstance(value, timedelta):
        return value.total_seconds()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


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


def _holds_bytes(kind: Any) -> bool:
    """Return whether a type, as of images, has bytes, which no JSON holds."""
    import pyarrow as pa

    is_bytes = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view)
    if pa.types.is_dictionary(kind):
        return _holds_bytes(kind.value_type)
    return any(check(kind) for check in is_bytes) or any(
        _holds_bytes(kind.field(i).type) for i in range(kind.num_fields)
    )


def _in_microseconds(batch: Any) -> Any:
    """Cut the times of a batch to microseconds, because Python's times have no nanoseconds."""
    import pyarrow as pa

    for place, column in enumerate(batch.schema):
        if getattr(column.type, "unit", None) != "ns":
            continue
        if pa.types.is_timestamp(column.type):
            kind = pa.timestamp("us", column.type.tz)
        else:
            kind = pa.duration("us") if pa.types.is_duration(column.type) else pa.time64("us")
        batch = batch.set_column(place, column.name, batch.column(place).cast(kind, safe=False))
    return batch


def _item_type(kind: Any) -> Any:
    """Return the type of a list's items, or the type itself."""
    import pyarrow as pa

    return kind.value_type if pa.types.is_list(kind) or pa.types.is_large_list(kind) else kind


def _is_short_float(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_float32(kind) or pa.types.is_float16(kind))
