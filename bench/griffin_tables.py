"""The tables of the GRIFFIN paper: rows, figures of trainings and arms, and what its latency formula predicts."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.console import Group
from rich.table import Table

from bench.ablation_arms import PromptGeneration
from bench.tables import new_table
from swiftbatch.jobs.json_records import Frozen
from swiftbatch.worker.decode_bench import digest
from swiftbatch.worker.training.griffin_recipe import GriffinRecipe
from swiftbatch.worker.training.train_griffin import GriffinAccuracyRecord

DIGITS = 4


def predicted_speedup(plain_ms: float, verify_ms: float, num_levels: float, level_ms: float, tau: float) -> float:
    """Equation 14: t / (t + d x tbar) x tau, with `verify_ms` as the t of the denominator.

    `plain_ms` is a forward of plain decoding, `level_ms` one of the draft model, of which a step has `num_levels`;
    `tau` counts the tokens of a step.
    """
    return plain_ms / (verify_ms + num_levels * level_ms) * tau


@dataclass(frozen=True)
class Training:
    """A draft model that is there, as one row of a table."""

    row: str
    seed: int
    folder: Path
    recipe: GriffinRecipe
    accuracy: list[GriffinAccuracyRecord]  # after training, for each kind of held-out text; none where there are none


class GriffinFigures(Frozen):
    """Generations of one sequence each, next to plain decoding of their first tokens.

    All counts and times begin behind the first step, which reads what the draft model sees.
    """

    num_tokens: int  # behind all prompts
    num_plain_tokens: int
    ms_per_token: float
    plain_ms_per_token: float
    speedup: float
    tokens_per_step: float  # tau: the bonus token and steps without a draft included
    nodes_per_step: float
    levels_per_step: float  # d: forwards of the draft model
    level_ms: float  # tbar: all of drafting, shared out among them
    plain_verify_ms: float  # t: the target's forward over one row
    verify_ms: float  # its forward over a tree
    predicted_speedup: float  # by the formula, as if a tree cost what one row costs
    predicted_tree_speedup: float  # with what a tree costs
    tokens_sha256: str  # over the generated ids as little-endian uint32, prompt behind prompt

    @classmethod
    def of(cls, pairs: list[tuple[PromptGeneration, PromptGeneration]]) -> GriffinFigures:
        """Figures of generations, each with plain decoding behind the same prompt."""
        generations = [generation for generation, _ in pairs]
        total, plain = _Total.of(generations), _Total.of([plain for _, plain in pairs])
        tau, levels = total.num_tokens / total.num_steps, total.num_levels / total.num_steps
        level_ms = 1000 * total.draft_seconds / total.num_levels if total.num_levels else 0.0
        plain_verify_ms, verify_ms = plain.verify_ms, total.verify_ms
        return cls(
            num_tokens=total.num_tokens,
            num_plain_tokens=plain.num_tokens,
            ms_per_token=round(total.ms_per_token, DIGITS),
            plain_ms_per_token=round(plain.ms_per_token, DIGITS),
            speedup=round(plain.ms_per_token / total.ms_per_token, DIGITS),
            tokens_per_step=round(tau, DIGITS),
            nodes_per_step=round(total.num_nodes / total.num_steps, DIGITS),
            levels_per_step=round(levels, DIGITS),
            level_ms=round(level_ms, DIGITS),
            plain_verify_ms=round(plain_verify_ms, DIGITS),
            verify_ms=round(verify_ms, DIGITS),
            predicted_speedup=round(predicted_speedup(plain_verify_ms, plain_verify_ms, levels, level_ms, tau), DIGITS),
            predicted_tree_speedup=round(predicted_speedup(plain_verify_ms, verify_ms, levels, level_ms, tau), DIGITS),
            tokens_sha256=digest(*(token_ids for generation in generations for token_ids in generation.token_ids)),
        )


@dataclass
class _Total:
    """Generations behind their first steps, added up."""

    num_tokens: int = 0
    num_steps: int = 0
    num_nodes: int = 0
    num_levels: int = 0
    seconds: float = 0.0
    verify_seconds: float = 0.0
    draft_seconds: float = 0.0

    @classmethod
    def of(cls, generations: list[PromptGeneration]) -> _Total:
        total = cls()
        for first, last in (generation.span for generation in generations):
            total.num_tokens += last.num_tokens - first.num_tokens
            total.num_steps += last.num_steps - first.num_steps
            total.num_nodes += last.num_draft_tokens - first.num_draft_tokens
            total.num_levels += last.draft.num_levels - first.draft.num_levels
            total.seconds += last.seconds - first.seconds
            total.verify_seconds += last.step_seconds["verify"] - first.step_seconds["verify"]
            total.draft_seconds += sum(last.draft.seconds.values()) - sum(first.draft.seconds.values())
        return total

    @property
    def ms_per_token(self) -> float:
        return 1000 * self.seconds / self.num_tokens

    @property
    def verify_ms(self) -> float:
        """The time of verification, per step."""
        return 1000 * self.verify_seconds / self.num_steps


TEMPERATURES = (0.0, 1.0)
NUM_ORDER_SEEDS = 3  # trainings of each row of table order
MAX_FORWARDS = 6  # of a draft, as deep as the paper's trees

Plan = Literal["own", "paper"]
"""As many nodes and levels as pay; or the paper's whole trees: 60 nodes, depth 6 (appendix C.2)."""

Expansion = Literal["hidden", "double"]
"""The sizes of the second fusion besides the target's feed-forward size: its hidden size, or twice the former."""

Layout = Literal["arms", "forwards", "order"]
"""Speed-up and accept length of every row; misaligned rates per forward; means and ranges over seeds."""


@dataclass(frozen=True)
class Variant:
    """One training: the name of its folder, and what it changes in `GriffinRecipe`."""

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    expansion: Expansion | None = None


@dataclass(frozen=True)
class GriffinTable:
    """Rows as in the paper, by their labels."""

    title: str
    label_header: str
    rows: dict[str, Variant]
    note: str
    layout: Layout = "arms"
    plans: tuple[Plan, ...] = ("own", "paper")


NO_HEAD = {"has_token_enhanced_head": False}
NO_FUSION = {"fusion": "none"}
NO_MASK = {"align_top_k": None}
ONE_PASS = {"num_passes": 1, **NO_MASK}

GRIFFIN = Variant("griffin")
WITHOUT_HEAD = Variant("without-head", NO_HEAD)
WITHOUT_FUSION = Variant("without-fusion", NO_FUSION)
WITHOUT_BOTH = Variant("without-fusion-and-head", NO_FUSION | NO_HEAD)
ONE_STEP = Variant("one-step", ONE_PASS)
EAGLE_2 = Variant("eagle-2", NO_FUSION | NO_HEAD | ONE_PASS)
HASS = Variant("hass", NO_FUSION | NO_HEAD | NO_MASK)


def _top_k(k: int) -> Variant:
    return Variant(f"top-k-{k}", {"align_top_k": k})


def _steps(n: int) -> Variant:
    return Variant(f"steps-{n}", {"num_passes": n})


GRIFFIN_TABLES: dict[str, GriffinTable] = {
    "1c": GriffinTable(
        "Figure 1c: misaligned tokens per draft forward",
        "recipe",
        {"EAGLE-2": EAGLE_2, "HASS": HASS, "GRIFFIN": GRIFFIN},
        "Of the drafts whose earlier tokens were right, the share whose n-th is not what the target draws.",
        layout="forwards",
        plans=(),
    ),
    "2": GriffinTable(
        "Table 2: token-alignable training (TAT) and draft model (TAD)",
        "method",
        {
            "GRIFFIN": GRIFFIN,
            "w/o TAT": ONE_STEP,
            "w/o TAD": WITHOUT_BOTH,
            "w/o both (EAGLE-2)": EAGLE_2,
            "HASS (ours, added)": HASS,
        },
        "Without TAT one forward is trained; without TAD the draft model is EAGLE's; HASS trains 3 without the mask.",
    ),
    "3": GriffinTable(
        "Table 3: top-k of the alignment mask",
        "top-k",
        {"NA": Variant("top-k-na", NO_MASK), "1": _top_k(1), "3": GRIFFIN, "5": _top_k(5), "10": _top_k(10)},
        "NA: no mask.",
    ),
    "4": GriffinTable(
        "Table 4: training steps",
        "N",
        {"1": ONE_STEP, "2": _steps(2), "3": GRIFFIN, "4": _steps(4), "5": _steps(5)},
        "Step n trains the n-th forward of a draft.",
    ),
    "5": GriffinTable(
        "Table 5: what the first fusion is fused with once more",
        "input",
        {
            "token (ours)": GRIFFIN,
            "feature": Variant("fusion-feature", {"fusion": "feature"}),
            "fused": Variant("fusion-fused", {"fusion": "fused"}),
        },
        "In place of x in equation 7: the feature F, or the first fusion h.",
    ),
    "6": GriffinTable(
        "Table 6: parts of the token-guided fusion",
        "method",
        {
            "GRIFFIN": GRIFFIN,
            "ablation 1": Variant("fusion-not-expanded", {"expansion_size": 0}),
            "ablation 2": Variant("fusion-without-token", {"fusion": "without-token"}),
            "ablation 3": Variant("fusion-without-fused", {"fusion": "without-fused"}),
        },
        "1: neither up-projector nor SiLU. 2: without x in equation 7. 3: without h in equation 7.",
    ),
    "7": GriffinTable(
        "Table 7: size of the expansion",
        "expansion",
        {
            "hidden size": Variant("expansion-hidden", expansion="hidden"),
            "feed-forward size (ours)": GRIFFIN,
            "twice that": Variant("expansion-double", expansion="double"),
        },
        "In the target: its hidden size and that of its feed-forward layers.",
    ),
    "8": GriffinTable(
        "Table 8: parts of the token-alignable draft model",
        "method",
        {"GRIFFIN": GRIFFIN, "w/o TEH": WITHOUT_HEAD, "w/o TGF": WITHOUT_FUSION, "w/o both": WITHOUT_BOTH},
        "TEH: token-enhanced head. TGF: token-guided fusion.",
    ),
    "order": GriffinTable(
        "Order of the parts by what they bring",
        "method",
        {
            "GRIFFIN": GRIFFIN,
            "w/o head": WITHOUT_HEAD,
            "w/o fusion": WITHOUT_FUSION,
            "w/o alignment": ONE_STEP,
            "none of them (EAGLE-2)": EAGLE_2,
        },
        "Rows stand in the paper's order. Mean and range over trainings with other seeds; trees of 60 nodes, depth 6.",
        layout="order",
        plans=("paper",),
    ),
}


FORMULA_NOTE = (
    "t: plain decoding's forward; t tree: over a tree; t draft: one of d draft levels. The formula is "
    "t / (t + d x t draft) x tau; with t tree, that stands in its denominator."
)


class ArmKey(NamedTuple):
    row: str
    seed: int
    temperature: float
    plan: Plan


@dataclass
class Results:
    trainings: list[Training] = field(default_factory=list)
    figures: dict[ArmKey, GriffinFigures] = field(default_factory=dict)

    def seeds(self) -> list[int]:
        return list(dict.fromkeys(training.seed for training in self.trainings))


def render(table: GriffinTable, results: Results, compared: str) -> Group:
    """The paper's table and what is behind it; `compared` says what the arms were compared over."""
    if table.layout == "forwards":
        return Group(*_forwards(table, results), table.note)
    paper = [_paper(table, results)] if table.layout == "arms" else [_order(table, results), *_orders(table, results)]
    return Group(*paper, table.note, "", _times(results), _formula(results), FORMULA_NOTE, compared)


def summary(key: ArmKey, figures: GriffinFigures) -> str:
    """One arm in a line, as soon as it has run."""
    return (
        f"{key.row}, seed {key.seed}, T = {key.temperature:g}, {key.plan} tree: {figures.tokens_per_step:.2f} tokens a "
        f"step, {figures.ms_per_token:.2f} ms a token, plain decoding {figures.plain_ms_per_token:.2f} "
        f"({figures.speedup:.2f}x)"
    )


def _paper(table: GriffinTable, results: Results) -> Table:
    """Speed-up and accept length of every row: with trees that pay, and with the paper's."""
    headers = [f"T = {t:g}\n{name}" for t in TEMPERATURES for name in ("SR", "tau", "tau of\n60 nodes")]
    rich = new_table(table.title, (table.label_header,), headers)
    [seed] = results.seeds()
    for row in table.rows:
        cells = []
        for t in TEMPERATURES:
            own, paper = (results.figures[ArmKey(row, seed, t, plan)] for plan in table.plans)
            cells += [f"{own.speedup:.2f}x", f"{own.tokens_per_step:.2f}", f"{paper.tokens_per_step:.2f}"]
        rich.add_row(row, *cells)
    return rich


def _times(results: Results) -> Table:
    """Make the table of what a step of each arm consists of."""
    headers = ["T", "tree", "nodes", "d", "t", "t tree", "t draft"]
    rich = new_table("Times of forwards (ms), nodes and draft levels per step", ("arm",), headers)
    for key, arm in results.figures.items():
        counts = f"{arm.nodes_per_step:.1f}", f"{arm.levels_per_step:.1f}"
        times = f"{arm.plain_verify_ms:.2f}", f"{arm.verify_ms:.2f}", f"{arm.level_ms:.2f}"
        rich.add_row(_name(key, results), f"{key.temperature:g}", key.plan, *counts, *times)
    return rich


def _formula(results: Results) -> Table:
    """Equation 14 of the paper beside what was measured."""
    headers = ["T", "tree", "tau", "formula", "with\nt tree", "measured"]
    rich = new_table("Speed-up by the formula of appendix H, and as measured", ("arm",), headers)
    for key, arm in results.figures.items():
        speedups = (arm.predicted_speedup, arm.predicted_tree_speedup, arm.speedup)
        cells = f"{arm.tokens_per_step:.2f}", *(f"{speedup:.2f}x" for speedup in speedups)
        rich.add_row(_name(key, results), f"{key.temperature:g}", key.plan, *cells)
    return rich


def _name(key: ArmKey, results: Results) -> str:
    return key.row if len(results.seeds()) == 1 else f"{key.row}, seed {key.seed}"


def _forwards(table: GriffinTable, results: Results) -> list[Table]:
    """Misaligned rates by way of drawing and row, a table for each kind of text."""
    headers = [f"n = {n}" for n in range(1, MAX_FORWARDS + 1)]
    tables = []
    for records in zip(*(training.accuracy for training in results.trainings), strict=True):
        rich = new_table(f"{table.title}, {records[0].texts}", ("drawn at", table.label_header), headers)
        for way in records[0].misaligned:
            for training, record in zip(results.trainings, records, strict=True):
                rich.add_row(way, training.row, *(f"{rate:.1%}" for rate in record.misaligned[way]))
        tables.append(rich)
    return tables


def _order(table: GriffinTable, results: Results) -> Table:
    """Means over seeds, with the least and the most."""
    temperatures = [f"T = {t:g}" for t in TEMPERATURES]
    headers = [f"{name}\n{t}" for name in ("tau", "accuracy") for t in temperatures]
    rich = new_table(table.title, (table.label_header,), headers)
    for row in table.rows:
        taus = [_spread(_taus(results, row, t), ".2f") for t in TEMPERATURES]
        shares = [_spread(_accuracies(results, row, t), ".1%") for t in TEMPERATURES]
        rich.add_row(row, *taus, *shares)
    return rich


def _orders(table: GriffinTable, results: Results) -> list[str]:
    """Say in words whether rows come out in the paper's order."""
    lines = []
    for t in TEMPERATURES:
        taus = {row: _taus(results, row, t) for row in table.rows}
        num_held = sum(all(a > b for a, b in pairwise(column)) for column in zip(*taus.values(), strict=True))
        by_mean = sorted(taus, key=lambda row: -statistics.mean(taus[row]))
        lines.append(
            f"T = {t:g}: tau falls in the paper's order with {num_held} of {len(results.seeds())} seeds; by its mean: "
            f"{' > '.join(by_mean)}"
        )
    return lines


def _taus(results: Results, row: str, temperature: float) -> list[float]:
    """List the accept lengths, one for each seed."""
    return [
        figures.tokens_per_step
        for key, figures in results.figures.items()
        if key.row == row and key.temperature == temperature
    ]


def _accuracies(results: Results, row: str, temperature: float) -> list[float]:
    """List the accuracies, one for each seed: the mean over forwards and rows of all held-out texts."""
    return [
        statistics.fmean(
            [statistics.fmean(record.same[f"T {temperature:g}"]) for record in training.accuracy],
            [record.num_rows for record in training.accuracy],
        )
        for training in results.trainings
        if training.row == row and training.accuracy
    ]


def _spread(values: list[float], form: str) -> str:
    if not values:
        return "-"
    return f"{statistics.mean(values):{form}}\n{min(values):{form}} to {max(values):{form}}"
