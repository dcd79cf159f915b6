"""Long generations of several arms as the paper's tables show them."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

from rich.console import Group
from rich.table import Table

from swiftbatch.worker.bench.bench_tables import new_table, number, short
from swiftbatch.worker.bench.long.records import LongRecord, LongResult
from swiftbatch.worker.papers.tokenswift.tables.catalogue import Ablation, View

Measure = Callable[[LongRecord], float | None]


def _distinct(n: int, record: LongRecord) -> float:
    return record.distinct[f"distinct_{n}"]


MEASURES: dict[str, tuple[str, Measure]] = {  # header, and the figure since the start of the generation
    "alpha": ("alpha", lambda record: record.total.alpha),
    "beta": ("beta", lambda record: record.total.beta),
    "speedup": ("x", lambda record: record.total.speedup),
    **{f"distinct_{n}": (f"Distinct\n{n}", partial(_distinct, n)) for n in range(1, 5)},
    "distinct_average": ("AVG.", lambda record: statistics.mean(record.distinct.values())),
}


def render(ablation: Ablation, results: list[LongResult], lengths: list[int]) -> Group:
    """All tables of an ablation; `results` has one for each arm, with a record at each of `lengths`."""
    labels = [arm.label for arm in ablation.arms]
    records = {label: result.records for label, result in zip(labels, results, strict=True)}
    return Group(*(LAYOUTS[view.layout](view, records, lengths) for view in ablation.views))


def _by_length(view: View, records: dict[str, list[LongRecord]], lengths: list[int]) -> Table:
    table = new_table(view.title, ("tokens",), ("", *records))
    for index, length in enumerate(lengths):
        for row, measure in enumerate(view.measures):
            cells = [_cell(measure, arm[index]) for arm in records.values()]
            table.add_row("" if row else short(length), MEASURES[measure][0], *cells)
    return table


def _by_arm(view: View, records: dict[str, list[LongRecord]], lengths: list[int]) -> Table:
    headers = [f"{short(length)}\n{MEASURES[measure][0]}" for length in lengths for measure in view.measures]
    table = new_table(view.title, ("",), headers)
    for label, arm in records.items():
        table.add_row(label, *(_cell(measure, record) for record in arm for measure in view.measures))
    return table


def _at_end(view: View, records: dict[str, list[LongRecord]], lengths: list[int]) -> Table:
    headers = (MEASURES[measure][0] for measure in view.measures)
    table = new_table(f"{view.title}, {short(lengths[-1])} tokens", ("",), headers)
    for label, arm in records.items():
        table.add_row(label, *(_cell(measure, arm[-1]) for measure in view.measures))
    return table


def _cell(measure: str, record: LongRecord) -> str:
    return number(MEASURES[measure][1](record))


LAYOUTS: dict[str, Callable[[View, dict[str, list[LongRecord]], list[int]], Table]] = {
    "by_length": _by_length,
    "by_arm": _by_arm,
    "at_end": _at_end,
}
