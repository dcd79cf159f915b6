"""`swiftbatch bench ablation tokenswift`: a table of the paper, a long generation for each arm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field
from rich.console import Group

from swiftbatch.jobs.sampling import SamplingParams
from swiftbatch.worker.bench.bench_variants import bench_slots
from swiftbatch.worker.bench.caches.compared_caches import with_cache
from swiftbatch.worker.bench.long.long import LongBenchOptions, Report, generate_long
from swiftbatch.worker.bench.long.records import LongResult
from swiftbatch.worker.bench.options import BenchOptions, check_length
from swiftbatch.worker.kernels.sizes import BLOCK
from swiftbatch.worker.model.files import locate_model
from swiftbatch.worker.papers.tokenswift.tables.catalogue import (
    ABLATIONS,
    PAPER_SAMPLING,
    Ablation,
    AblationArm,
    Engine,
)
from swiftbatch.worker.papers.tokenswift.tables.reuse import BASE_OPTIONS, metered_drafter
from swiftbatch.worker.papers.tokenswift.tables.tables import render
from swiftbatch.worker.papers.tokenswift.tokenswift import TokenSwiftOptions
from swiftbatch.worker.target.step_costs import step_costs_of

NUM_LENGTHS = 5  # the paper's 20K, 40K, ... 100K, scaled
PLAIN_EVERY = 2500


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
        return replace(BASE_OPTIONS[self.engine], **with_cache(arm.options))


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
    for number, arm in enumerate(arms, 1):
        report(f"arm {number} of {len(arms)}: {arm.label}")
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
