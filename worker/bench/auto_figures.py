"""The figures of `swiftbatch bench auto`: records and table."""

from __future__ import annotations

from collections.abc import Sequence as Items

from rich.table import Table

from swiftbatch.jobs.frozen_records import Frozen
from swiftbatch.worker.bench.bench_tables import new_table

BASELINE, CHOOSER = "autoregressive", "auto"
TWIN = "autoregressive again"  # plain decoding beside itself: what the machine's own wandering makes of a ratio


class AutoRecord(Frozen):
    """One repetition of a cell of the grid: the speed of all engines there."""

    position: int
    temperature: float
    num_sequences: int
    num_tokens: int  # of each job
    repetition: int
    tokens_per_second: dict[str, float]  # of all sequences together, by engine
    has_same_tokens: bool

    @property
    def best(self) -> str:
        """The fastest engine beside the one that chooses."""
        others = (name for name in self.tokens_per_second if name not in (CHOOSER, TWIN))
        return max(others, key=self.tokens_per_second.__getitem__)

    def ratio(self, engine: str, to: str) -> float:
        """The speed of one engine beside that of another."""
        return self.tokens_per_second[engine] / self.tokens_per_second[to]


def render(records: Items[AutoRecord]) -> Table:
    """A table for people: what `auto` makes of plain decoding, and of the engine that is best in a cell.

    Of several repetitions of a cell it has the one where `auto` is worst beside the best other engine. Its
    last line has the worst that plain decoding was beside itself: no ratio can be told from 1 more finely than that.
    """
    headers = (
        "position",
        "T",
        "jobs",
        "tokens\na job",
        "plain\ntok/s",
        "auto\nto\nplain",
        "best other",
        "its\nto\nplain",
        "auto\nto\nbest",
    )
    table = new_table("", (), headers)
    table.add_column("same")
    for repetitions in _cells(records):
        record = min(repetitions, key=lambda each: each.ratio(CHOOSER, each.best))
        table.add_row(
            str(record.position),
            f"{record.temperature:g}",
            str(record.num_sequences),
            str(record.num_tokens),
            f"{record.tokens_per_second[BASELINE]:.0f}",
            f"{min(each.ratio(CHOOSER, BASELINE) for each in repetitions):.2f}x",
            record.best,
            f"{record.ratio(record.best, BASELINE):.2f}x",
            f"{record.ratio(CHOOSER, record.best):.2f}x",
            "yes" if all(each.has_same_tokens for each in repetitions) else "no",
        )
    if records:
        worst = min(record.ratio(CHOOSER, record.best) for record in records)
        least = min(record.ratio(CHOOSER, BASELINE) for record in records)
        table.caption = f"auto at worst: {worst:.2f}x of the best other engine, {least:.2f}x of plain decoding"
        table.caption += _worst_of_twins(records)
    return table


def _worst_of_twins(records: Items[AutoRecord]) -> str:
    """Say the least ratio of two equal contestants, which figures of former versions do not have."""
    twins = [each.ratio(TWIN, BASELINE) for each in records if TWIN in each.tokens_per_second]
    return f"; plain decoding beside itself: {min(twins):.2f}x" if twins else ""


def _cells(records: Items[AutoRecord]) -> list[list[AutoRecord]]:
    """The repetitions of every cell, in the order that they came in."""
    cells: dict[tuple[object, ...], list[AutoRecord]] = {}
    for record in records:
        place = (record.position, record.temperature, record.num_sequences, record.num_tokens)
        cells.setdefault(place, []).append(record)
    return list(cells.values())
