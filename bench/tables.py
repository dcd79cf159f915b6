"""Records of benchmarks, as JSON lines and as tables."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from swiftbatch.worker.exactness.gpu_doctor.findings import cell_of

Record = dict[str, Any]


class Curve(NamedTuple):
    """A figure of shown rows: `x` is the field of the places, each of `lines` the fields in one axis."""

    x: str
    lines: tuple[tuple[str, ...], ...]


def tables(records: Iterable[Record], *, is_markdown: bool = False) -> str:
    """Return a table per run of records with the same fields."""
    parts = []
    for names, alike in itertools.groupby(map(flat, records), key=tuple):
        shown = [name for name in names if not name.endswith("sha256")]
        cells = [shown, *([_cell(record[name]) for name in shown] for record in alike)]
        if shown == ["words"]:
            parts.append("\n".join(words for [words] in cells[1:]))
        else:
            parts.append("\n".join(_in_markdown(cells) if is_markdown else _aligned(cells)))
    return "\n\n".join(parts)


def _in_markdown(cells: list[list[str]]) -> Iterator[str]:
    for line in [cells[0], ["---"] * len(cells[0]), *cells[1:]]:
        yield f"| {' | '.join(line)} |"


def _aligned(cells: list[list[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    is_number = [all(cell[:1] in "-0123456789" for cell in column) for column in zip(*cells[1:], strict=True)]
    for line in cells:
        padded = (
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(line, widths, is_number, strict=True)
        )
        yield "  ".join(padded).rstrip()


def _cell(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return cell_of(value)


def flat(record: Record) -> Record:
    """Merge nested fields into the record, without lists."""
    found: Record = {}
    for name, value in record.items():
        if isinstance(value, dict):
            found |= {f"{name}.{key}": each for key, each in flat(value).items()}
        elif not isinstance(value, list | tuple):
            found[name] = value
    return found


def only(records: Iterable[Record], names: Iterable[str]) -> list[Record]:
    return [{name: each[name] for name in names if name in each} for each in map(flat, records)]


def pivot(records: Iterable[Record], rows: Iterable[str], column: str, values: Iterable[str]) -> list[Record]:
    """Return a row per place in `rows`, with `values` per value of `column`; missing ones are None."""
    given, names, kept = [flat(record) for record in records], tuple(rows), tuple(values)
    headers = {f"{each[column]} {value}".strip(): None for each in given for value in kept}
    if len(kept) == 1:
        headers = {str(each[column]): None for each in given}
    found: dict[tuple[Any, ...], Record] = {}
    for each in given:
        place = {name: each[name] for name in names}
        row = found.setdefault(tuple(place.values()), place | headers)
        row |= {f"{each[column]} {value}" if len(kept) > 1 else str(each[column]): each.get(value) for value in kept}
    return list(found.values())
