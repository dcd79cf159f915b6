"""The panels of a dashboard, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Selectors of series. The driver's have the run's totals, and no worker's label that could be chosen.
DRIVER = 'run=~"$run", model_name=~"$model"'
WORKER = 'run=~"$run", model_name=~"$model", worker=~"$worker"'
RATE = "$__rate_interval"  # long enough for a rate at any zoom

Kind = Literal["lines", "stack", "value"]


@dataclass(frozen=True)
class Query:
    """An expression of PromQL; `legend` names its series by their labels, as in `{{worker}}`."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """One picture. `unit` is one of Grafana's, `width` in its 24 columns."""

    title: str
    meaning: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Kind = "lines"
    width: int = 8


@dataclass(frozen=True)
class Board:
    """One dashboard; its file and address have its name in lower case."""

    title: str
    meaning: str
    panels: tuple[Panel, ...]

    @property
    def name(self) -> str:
        return self.title.lower()


def value(title: str, meaning: str, expr: str, unit: str = "short") -> Panel:
    """A single number as it is now."""
    return Panel(title, meaning, (Query(expr, title),), unit, "value", 6)


def lines(title: str, meaning: str, expr: str, legend: str, unit: str = "short") -> Panel:
    """Lines over time."""
    return Panel(title, meaning, (Query(expr, legend),), unit)


def stack(title: str, meaning: str, expr: str, legend: str, unit: str = "short") -> Panel:
    """Areas over time that add up."""
    return Panel(title, meaning, (Query(expr, legend),), unit, "stack")
