"""The figures of `swiftbatch bench auto`: records and table."""

from __future__ import annotations

from collections.abc import Sequence as Items

from rich.table import Table

from jobs.frozen import Frozen
from worker.bench.tables import new_table

BASELINE, CHOOSER = "autoregressive", "auto"


class AutoRecord(Frozen):
    """One cell of the grid: the speed of all engines there."""

    position: int
    temperature: float
    num_sequences: int
    num_tokens: int  # of each sequence
    tokens_per_second: dict[str, float]  # of all sequences together, by engine
    has_same_tokens: bool

    @property
    def best(self) -> str:
        """The fastest engine beside the one that chooses."""
        return max((name for name in self.tokens_per_second if name != CHOOSER), key=self.tokens_per_second.__getitem__)

    def ratio(self, engine: str, to: str) -> float:
        """The speed of one engine beside that of another."""
        return self.tokens_per_second[engine] / self.tokens_per_second[to]


def render(records: Items[AutoRecord]) -> Table:
    """A table for people: what `auto` makes of plain decoding, and of the engine that is best in a cell."""
    headers = (
        "position",
        "T",
        "jobs",
        "plain\ntokens/s",
        "auto\nto\nplain",
        "best other",
        "its\nto\nplain",
        "auto\nto\nbest",
    )
    table = new_table("", (), headers)
    table.add_column("same\ntokens")
    for record in records:
        table.add_row(
            str(record.position),
            f"{record.temperature:g}",
            str(record.num_sequences),
            f"{record.tokens_per_second[BASELINE]:.0f}",
            f"{record.ratio(CHOOSER, BASELINE):.2f}x",
            record.best,
            f"{record.ratio(record.best, BASELINE):.2f}x",
            f"{record.ratio(CHOOSER, record.best):.2f}x",
            "yes" if record.has_same_tokens else "no",
        )
    if records:
        worst = min(record.ratio(CHOOSER, record.best) for record in records)
        least = min(record.ratio(CHOOSER, BASELINE) for record in records)
        table.caption = f"auto at worst: {worst:.2f}x of the best other engine, {least:.2f}x of plain decoding"
    return table
