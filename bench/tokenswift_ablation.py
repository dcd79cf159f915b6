"""`python -m bench ablation tokenswift`: a table of the paper, a long generation for each arm; what reuse brings."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field
from rich.console import Group
from rich.table import Table

from bench.compared_caches import with_cache
from bench.long import METERED, LongBenchOptions, Report, generate_long, metered_drafter
from bench.long_figures import LongRecord, LongResult
from bench.tables import new_table, number, short
from bench.tokenswift_tables import ABLATIONS, PAPER_SAMPLING, Ablation, AblationArm, Engine, View
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.decode_bench import BenchOptions, bench_slots, check_length
from swiftbatch.worker.drafters.tokenswift.tokenswift import TokenSwiftOptions
from swiftbatch.worker.forward.step_costs import step_costs_of
from swiftbatch.worker.kernels.kernel_sizes import BLOCK
from swiftbatch.worker.model.model_files import locate_model

NUM_LENGTHS = 5  # the paper's 20K, 40K, ... 100K, scaled
PLAIN_EVERY = 2500
Measure = Callable[[LongRecord], float | None]


class AblationOptions(BenchOptions):
    """The table asked for, and how many tokens each of its arms generates."""

    table: str
    engine: Engine
    num_tokens: int = Field(ge=NUM_LENGTHS * BLOCK)  # more between two records than a step commits
    seed: int = Field(ge=0)
    text: Path | None = None
    draft_model: Path | None = None

    @property
    def ablation(self) -> Ablation:
        return ABLATIONS[self.table]

    def arm_options(self, arm: AblationArm) -> LongBenchOptions:
        every = self.num_tokens // NUM_LENGTHS
        sampling = PAPER_SAMPLING | arm.sampling
        shared = self.model_dump(include={"model", "engine", "dtype", "device", "num_threads", "text"})
        return LongBenchOptions(
            sampling=SamplingParams(max_tokens=every * NUM_LENGTHS, seed=self.seed, ignore_eos=True, **sampling),
            prefill=arm.prefill,
            every=every,
            plain_every=min(PLAIN_EVERY, every),
            **shared,
        )

    def tokenswift_options(self, arm: AblationArm) -> TokenSwiftOptions:
        return replace(METERED[self.engine], **with_cache(arm.options))


def run_ablation(options: AblationOptions, report: Report = lambda line: None) -> Group:
    """Run all arms and lay out the tables. Writes JSON after each arm. Raises BenchError, ModelError."""
    files = locate_model(options.model)
    arms = options.ablation.arms
    for arm in arms:
        check_length(files, arm.prefill, options.arm_options(arm).num_tokens)
    longest = max(arm.prefill + options.arm_options(arm).num_tokens for arm in arms)
    target = options.load(files, bench_slots([options.engine], longest))
    costs = step_costs_of(target)
    results: list[LongResult] = []
    for place, arm in enumerate(arms, 1):
        report(f"arm {place} of {len(arms)}: {arm.label}")
        changed = options.tokenswift_options(arm)
        metered = metered_drafter(options.engine, target, costs, options.draft_model, changed)
        results.append(generate_long(options.arm_options(arm), target, *metered, report))
        options.write({"arms": _documents(arms, results)}, target)
    return render(options.ablation, results, options.arm_options(arms[0]).record_stops())


def _documents(arms: tuple[AblationArm, ...], results: list[LongResult]) -> list[dict[str, Any]]:
    return [
        {"label": arm.label, "options": arm.options, "sampling": arm.sampling, "prefill": arm.prefill}
        | {"result": result.model_dump()}
        for arm, result in zip(arms, results, strict=False)
    ]


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
