"""Findings of checks and their printed page, without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swiftbatch.jobs.json_records import Frozen
from swiftbatch.jobs.run.run_records import LinearName

if TYPE_CHECKING:
    from swiftbatch.worker.exactness.gpu_doctor.model_under_test import Parts

Row = dict[str, int | float | str]


class Finding(Frozen):
    """Figures of a check, with the same columns in all rows, and its verdict."""

    passed: bool
    words: str
    rows: list[Row]
    linear: LinearName | None = None  # the kernel that matrix products use from now on
    unproved: str | None = None  # what the check did not test


@dataclass(frozen=True)
class Check:
    """Check that must pass before later ones mean something."""

    name: str
    proves: str
    run: Callable[[Parts], Finding]


class Result(Frozen):
    """One check's name and finding."""

    name: str
    proves: str
    seconds: float
    finding: Finding

    def page(self) -> str:
        verdict = "passed" if self.finding.passed else "FAILED"
        head = f"{self.name}: {verdict} ({self.seconds:.1f} s)\n  {self.proves}\n  {self.finding.words}"
        return "\n".join([head, *_table(self.finding.rows)])


def differing_bits(found: int, tried: int, what: str) -> str:
    return f"{found:,} of {tried:,} {what} differ in any bit"


def _table(rows: list[Row]) -> Iterator[str]:
    if not rows:
        return
    columns = list(rows[0])
    cells = [columns, *([cell_of(row[column]) for column in columns] for row in rows)]
    widths = [max(len(line[place]) for line in cells) for place in range(len(columns))]
    is_text = [isinstance(rows[0][column], str) for column in columns]
    for line in cells:
        parts = (
            cell.ljust(width) if text else cell.rjust(width)
            for cell, width, text in zip(line, widths, is_text, strict=True)
        )
        yield f"    {'  '.join(parts)}".rstrip()


def cell_of(value: float | str) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return value if isinstance(value, str) else f"{value:,}"
