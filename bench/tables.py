"""The shared parts of all benchmarks' tables."""

from __future__ import annotations

from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.table import Table


def new_table(title: str, label_headers: Iterable[str], headers: Iterable[str]) -> Table:
    """An empty table: labels to the left, figures to the right."""
    rich = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left", title_style="")
    for header in label_headers:
        rich.add_column(header)  # gives way, as figures must not
    for header in headers:
        rich.add_column(header, justify="right", no_wrap=True)
    return rich


def number(value: float | None, form: str = ".2f") -> str:
    """A figure in a cell; a dash where there is none."""
    return "-" if value is None else format(value, form)


def short(num_tokens: int) -> str:
    """A length as the paper writes it, where it is round: 20K."""
    return f"{num_tokens // 1000}K" if num_tokens % 1000 == 0 else str(num_tokens)
