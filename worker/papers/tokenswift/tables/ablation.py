"""`swiftbatch bench ablation tokenswift`: a table of the paper, a long generation for each arm; what reuse brings."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field
from rich.console import Group
from rich.table import Table

from swiftbatch.jobs.sampling import SamplingParams
from swiftbatch.worker.bench.bench_options import BenchOptions, check_length
from swiftbatch.worker.bench.bench_tables import new_table, number, short
from swiftbatch.worker.bench.bench_variants import bench_slots
from swiftbatch.worker.bench.compared_caches import with_cache
from swiftbatch.worker.bench.long.long_bench import LongBenchOptions, Report, generate_long
from swiftbatch.worker.bench.long.long_figures import LongRecord, LongResult
from swiftbatch.worker.bench.long.long_generation import ReuseTally
from swiftbatch.worker.drafters.drafter_interface import Drafter
from swiftbatch.worker.drafters.two_level.chain import Chain
from swiftbatch.worker.drawing.draft_tree import DraftTree
from swiftbatch.worker.drawing.sequence import Sequence
from swiftbatch.worker.drawing.verification import Verification
from swiftbatch.worker.kernels.kernel_sizes import BLOCK
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.papers.tokenswift.digit_tree import Sources, by_token
from swiftbatch.worker.papers.tokenswift.tables.catalogue import (
    ABLATIONS,
    PAPER_SAMPLING,
    Ablation,
    AblationArm,
    Engine,
    View,
)
from swiftbatch.worker.papers.tokenswift.tokenswift import TokenSwiftOptions, TokenSwiftProposer, tokenswift
from swiftbatch.worker.papers.tokenswift.variants import PAPER
from swiftbatch.worker.target.step_costs import Costs, step_costs_of
from swiftbatch.worker.target.target import TargetModel

BASE_OPTIONS = {"tokenswift-paper": PAPER, "tokenswift": TokenSwiftOptions()}
NOTHING = Sources([], [])


@dataclass
class _Asked:
    """The length of the text behind which a tree was asked for, and what the tree was made of."""

    start: int
    sources: Sources = NOTHING


class MeteredProposer(TokenSwiftProposer):
    """A proposer that keeps what its trees are made of until it hears which tokens were accepted."""

    def __init__(self, tally: ReuseTally, *parts: Any) -> None:
        super().__init__(*parts)
        self._tally = tally
        self._asked: dict[str, list[_Asked]] = defaultdict(list)

    def propose(self, chains: list[Chain], limits: list[tuple[int, int]]) -> list[DraftTree]:
        for chain in chains:
            self._asked[chain.sequence.sequence_id].append(_Asked(len(chain.sequence)))
        return super().propose(chains, limits)

    def sources(self, chain: Chain) -> Sources:
        found = self._asked[chain.sequence.sequence_id][-1].sources = super().sources(chain)
        return found

    def update(self, sequence: Sequence, verification: Verification) -> None:
        end = len(sequence) - len(verification.committed_ids) + verification.num_accepted_tokens
        asked = [*self._asked.pop(sequence.sequence_id, []), _Asked(end + 1)]
        for one, later in itertools.pairwise(asked):  # the token in front of the later tree was drawn, not proposed
            path = tuple(sequence.token_ids[one.start : min(end, later.start - 1)].tolist())
            self._tally.num_accepted_tokens += sum(by_ngrams_alone(path, one.sources))
        super().update(sequence, verification)


def by_ngrams_alone(path: tuple[int, ...], sources: Sources) -> list[bool]:
    """Tell for every token of a path whether n-grams alone proposed it."""
    ngrams = [tuple(token for _, token in ngram) for ngram in sources.ngrams]
    in_digits, is_alone, found = True, False, []
    for depth, token in enumerate(path):
        in_digits = in_digits and depth < len(sources.levels) and token in by_token(sources.levels[depth])
        is_alone = is_alone or not (in_digits or token in sources.others(path[:depth]))
        is_alone = is_alone and any(ngram[: depth + 1] == path[: depth + 1] for ngram in ngrams)
        found.append(is_alone)
    return found


def metered_drafter(
    engine: str, target: TargetModel, costs: Costs, parts_folder: Path | None, options: TokenSwiftOptions | None = None
) -> tuple[Drafter, ReuseTally]:
    """TokenSwift's drafter, where `options` may be others than the engine's, and what its n-grams bring. ModelError."""
    tally = ReuseTally()
    new_proposer = partial(MeteredProposer, tally)
    return tokenswift(target, costs, parts_folder, options or BASE_OPTIONS[engine], new_proposer), tally


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
