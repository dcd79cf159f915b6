"""`python -m bench papers NAME`: a paper's tables and figures, each over several runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.options import machine_facts
from bench.tables import Curve, Record, flat
from swiftbatch.worker.exactness.gpu_doctor.findings import cell_of

PAPERS = {
    name: f"bench.{name.replace('-', '_')}_ablation"
    for name in ("token-recycling", "tokenswift", "triforce", "griffin")
}
"""Modules with `Options`, `each_table`, `run` and `shown`, and `CURVES` by table."""

Rows = list[Record]
"""A run's shown rows."""


def about(paper: str, options: Any) -> Record:
    """Return the first record: what all others depend on."""
    return {"paper": paper} | machine_facts(options) | {"options": options.model_dump(mode="json")}


def add_runs(
    runs: list[Rows], module: ModuleType, options: Any, num_runs: int, write: Callable[[Record], None]
) -> None:
    """Run a table with one seed after the other, and add what each run shows, also of a run that fails."""
    for number in range(num_runs):
        one, records = options.model_copy(update={"seed": options.seed + number}), []
        try:
            for record in module.run(one):
                records.append(record)
                write({"run": number} | record)
        finally:
            if records:
                runs.append([flat(row) for row in module.shown(records, one)])


def over_runs(runs: list[Rows]) -> Rows:
    """Merge the rows of several runs: a number that differs becomes its mean and standard deviation."""
    if len(runs) == 1:
        return runs[0]
    if len({tuple(map(tuple, rows)) for rows in runs}) > 1:  # other rows or fields: nothing to merge
        return [row for rows in runs for row in rows]
    return [{name: _merged([row[name] for row in same]) for name in same[0]} for same in zip(*runs, strict=True)]


def _merged(values: list[Any]) -> Any:
    if all(value == values[0] for value in values):
        return values[0]
    known = [value for value in values if value is not None]
    if not all(isinstance(value, int | float) for value in known):
        return "; ".join(dict.fromkeys(map(str, known)))
    deviation = statistics.stdev(known) if len(known) > 1 else 0.0
    return f"{cell_of(statistics.fmean(known))} ± {cell_of(deviation)}"


def draw(path: Path, curve: Curve, runs: list[Rows]) -> None:
    """Draw the mean of a table's runs, with bars of one standard deviation."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [[row for row in rows if curve.x in row and curve.lines[0][0] in row] for rows in runs]
    places = [str(row[curve.x]) for row in rows[0]]
    figure = Figure(figsize=(4.5 * len(curve.lines), 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, names in zip(figure.subplots(1, len(curve.lines), squeeze=False)[0], curve.lines, strict=True):
        for name in names:
            points = [[each[name] for each in same if each[name] is not None] for same in zip(*rows, strict=True)]
            means = [statistics.fmean(values) if values else float("nan") for values in points]
            bars = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in points]
            axes.errorbar(places, means, bars, marker="o", capsize=3, label=name)
        axes.set_xlabel(curve.x)
        for label in axes.get_xticklabels():
            label.set(rotation=30, horizontalalignment="right")  # so that it ends at its tick
        axes.legend(frameon=False)
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
