"""Trains and compares the rows of the GRIFFIN paper's tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, PreTrainedConfig

from bench.options import ALL, one_of
from bench.prompt_arms import Prompt, PromptArms, num_plain_tokens, read_prompt
from bench.tables import Curve, Record, only, pivot
from swiftbatch.scheduler.commands.options.option_types import say
from swiftbatch.worker.decode_bench import (
    BenchError,
    BenchOptions,
    Contestant,
    bench_slots,
    check_length,
    digest,
    encode,
    read_text,
)
from swiftbatch.worker.drafters.engine_options import GRIFFIN_PAPER, GriffinOptions
from swiftbatch.worker.drafters.griffin.griffin import griffin
from swiftbatch.worker.drafters.griffin.griffin_model import GriffinConfig
from swiftbatch.worker.forward.step_costs import step_costs_of
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import ModelFiles, locate_model
from swiftbatch.worker.training.feature_files import TEST
from swiftbatch.worker.training.recipes import GRIFFIN_RECIPE, GriffinRecipe
from swiftbatch.worker.training.train_griffin import GriffinAccuracyRecord, griffin_folder, train_griffin

FORMULA = ("row", "seed", "temperature", "tree", "tokens_per_step", "predicted", "predicted_tree", "speedup")
TIMES = (
    "row",
    "seed",
    "temperature",
    "tree",
    "nodes_per_step",
    "levels_per_step",
    "plain_verify_ms",
    "verify_ms",
    "level_ms",
)
TEMPERATURES = (0.0, 1.0)
NUM_ORDER_SEEDS = 3  # trainings per row of table order
MAX_FORWARDS = 6  # per draft, the depth of the paper's trees

Plan = Literal["own", "paper"]
"""As many nodes and levels as pay; or the paper's whole trees: 60 nodes, depth 6 (appendix C.2)."""

Expansion = Literal["hidden", "double"]
"""The sizes of the second fusion besides the target's feed-forward size: its hidden size, or twice the former."""

Layout = Literal["arms", "forwards", "order"]
"""Speed-up and accept length of every row; misaligned rates per forward; means and ranges over seeds."""


@dataclass(frozen=True)
class Variant:
    """A training's folder and changes of `GriffinRecipe`."""

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    expansion: Expansion | None = None


@dataclass(frozen=True)
class GriffinTable:
    """A table's rows by label, as in the paper."""

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


def predicted_speedup(plain_ms: float, verify_ms: float, num_levels: float, level_ms: float, tau: float) -> float:
    """Return equation 14's speedup, t / (t + d x tbar) x tau, with `verify_ms` as the denominator's t."""
    return plain_ms / (verify_ms + num_levels * level_ms) * tau


@dataclass(frozen=True)
class Training:
    """A trained draft model of one row."""

    row: str
    seed: int
    folder: Path
    recipe: GriffinRecipe
    accuracy: list[GriffinAccuracyRecord]  # after training, per kind of held-out text, if any


def figures_of(pairs: list[tuple[Contestant, Contestant]]) -> Record:
    """Compare generations with plain decoding after the same prompts.

    In equation 14 tau is `tokens_per_step`, d `levels_per_step`, tbar `level_ms` and t `plain_verify_ms`.
    """
    generations = [generation for generation, _ in pairs]
    total, plain = _Total.of(generations), _Total.of([plain for _, plain in pairs])
    tau, levels = total.num_tokens / total.num_steps, total.num_levels / total.num_steps
    level_ms = 1000 * total.draft_seconds / total.num_levels if total.num_levels else 0.0
    return {
        "num_tokens": total.num_tokens,
        "num_plain_tokens": plain.num_tokens,
        "ms_per_token": total.ms_per_token,
        "plain_ms_per_token": plain.ms_per_token,
        "speedup": plain.ms_per_token / total.ms_per_token,
        "tokens_per_step": tau,
        "nodes_per_step": total.num_nodes / total.num_steps,
        "levels_per_step": levels,
        "level_ms": level_ms,
        "plain_verify_ms": plain.verify_ms,
        "verify_ms": total.verify_ms,
        "predicted": predicted_speedup(plain.verify_ms, plain.verify_ms, levels, level_ms, tau),
        "predicted_tree": predicted_speedup(plain.verify_ms, total.verify_ms, levels, level_ms, tau),
        "tokens_sha256": digest(*(generation.token_ids() for generation in generations)),
    }


@dataclass
class _Total:
    """Sums over generations after their first steps."""

    num_tokens: int = 0
    num_steps: int = 0
    num_nodes: int = 0
    num_levels: int = 0
    seconds: float = 0.0
    verify_seconds: float = 0.0
    draft_seconds: float = 0.0

    @classmethod
    def of(cls, generations: list[Contestant]) -> _Total:
        total = cls()
        for first, last in (generation.engine.span for generation in generations):
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
        return 1000 * self.verify_seconds / self.num_steps


FEATURES = "features"  # shared by the trainings


def train_variants(
    rows: dict[str, Variant],
    seeds: range,
    files: ModelFiles,
    data: Path,
    work: Path,
    recipe: GriffinRecipe,
) -> list[Training]:
    """Train every row's missing draft models with every seed. Raises ModelError, CorpusError."""
    target = AutoConfig.from_pretrained(files.path, local_files_only=True, trust_remote_code=False)
    trainings = []
    for seed in seeds:
        for row, variant in rows.items():
            own = recipe_of(variant, recipe, seed, target)
            folder = work / f"{variant.name}-{seed}"
            train_griffin(files.name, data, folder, own, say, work / FEATURES)
            log = griffin_folder(folder, files.fingerprint, own).records()
            accuracy = [GriffinAccuracyRecord(**record) for record in log if record.get("when") == "after"]
            trainings.append(Training(row, seed, folder, own, accuracy))
    return trainings


def recipe_of(variant: Variant, base: GriffinRecipe, seed: int, target: PreTrainedConfig) -> GriffinRecipe:
    """Return `base` with a variant's changes and a seed."""
    sizes = GriffinConfig.for_target(target)
    expansions = {"hidden": sizes.hidden_size, "double": 2 * sizes.intermediate_size}
    changes: dict[str, Any] = dict(variant.changes)
    if variant.expansion is not None:
        changes["expansion_size"] = expansions[variant.expansion]
    return replace(base, seed=seed, **changes)


OPTIONS: dict[Plan, GriffinOptions] = {"own": GriffinOptions(), "paper": GRIFFIN_PAPER}


class Options(BenchOptions):
    table: str = ALL  # a name in `GRIFFIN_TABLES`
    data: Path  # books to train on
    work: Path  # trainings are kept here for other tables
    num_steps: int = GRIFFIN_RECIPE.num_steps
    num_own_texts: int = GRIFFIN_RECIPE.texts.num_own_texts
    num_seeds: int = NUM_ORDER_SEEDS  # of table order
    seed: int = 0
    text: Path | None = None  # books for the prompts, unseen in training
    num_prompts: int = 2
    prefill: int = 2048
    num_tokens: int = 256  # more than the first step commits


CURVES: dict[str, Curve] = {}


def each_table(options: Options) -> list[Options]:
    """Return the options of each wanted table that can be had."""
    if options.table != ALL:
        return [options]
    names = [name for name, table in GRIFFIN_TABLES.items() if options.text is not None or not table.plans]
    return [options.model_copy(update={"table": name}) for name in names]


def run(options: Options, recipe: GriffinRecipe = GRIFFIN_RECIPE) -> Iterator[Record]:
    """Repeat a table or figure of the GRIFFIN paper: train what its rows compare, then let them draft.

    Trainings are kept in --work, one folder each, for other tables and after a kill. Every arm continues the same
    prompts, as plain decoding does, and must give the same tokens.

    \b
    Example:
      python -m bench papers griffin --table 2 --data books --text test.jsonl --work griffin --json table2.jsonl
    """
    table, files = one_of(GRIFFIN_TABLES, options.table), locate_model(options.model)
    prompts = _prompts(options, files) if table.plans else []
    if table.layout == "forwards" and not any(options.data.rglob(TEST)):
        raise BenchError(f"data {options.data}: no file matches {TEST}; figure 1c is measured on test books")
    options.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.num_threads)  # for the trainings
    texts = replace(recipe.texts, num_own_texts=options.num_own_texts)
    recipe = replace(recipe, num_steps=options.num_steps, texts=texts)
    seeds = range(options.seed, options.seed + (options.num_seeds if table.layout == "order" else 1))
    trainings = train_variants(table.rows, seeds, files, options.data, options.work, recipe)
    for training in trainings:
        yield from _accuracies(training)
    if not prompts:
        return
    target = options.load(files, bench_slots(["griffin"], options.prefill + options.num_tokens, options.num_prompts))
    costs = step_costs_of(target)
    behind = [_read(options, target, prompt, number) for number, prompt in enumerate(prompts)]
    for training, temperature, plan in product(trainings, TEMPERATURES, table.plans):
        pairs = [arms.run(griffin(target, costs, training.folder, OPTIONS[plan]), temperature) for arms in behind]
        key = {"table": options.table, "row": training.row, "seed": training.seed, "temperature": temperature}
        yield key | {"tree": plan} | figures_of(pairs)


def _accuracies(training: Training) -> Iterator[Record]:
    """Yield held-out accuracy."""
    for record in training.accuracy:
        for way, rates in record.misaligned.items():
            yield {
                "row": training.row,
                "seed": training.seed,
                "texts": record.texts,
                "drawn_at": way,
                "accuracy": statistics.fmean(record.same[way]),
                "num_rows": record.num_rows,
            } | {f"n={n}": rate for n, rate in enumerate(rates, 1)}


def _prompts(options: Options, files: ModelFiles) -> list[Prompt]:
    """Take prompts from all over the text. Raises BenchError."""
    if options.text is None:
        raise BenchError(f"table {options.table}: its arms go on from a text; name one with --text FILE")
    check_length(files, options.prefill, options.num_tokens)
    ids = encode(files, read_text(options.text))
    between = len(ids) // options.num_prompts
    if between < options.prefill:
        raise BenchError(
            f"text {options.text}: it has {len(ids)} tokens, {options.num_prompts} prompts of {options.prefill} need "
            f"{options.num_prompts * options.prefill}"
        )
    return [Prompt(ids[i * between :][: options.prefill], []) for i in range(options.num_prompts)]


def _read(options: Options, target: TargetModel, prompt: Prompt, number: int) -> PromptArms:
    num_plain = num_plain_tokens(options.num_tokens, options.prefill)
    read = read_prompt(target, prompt, options.num_tokens)
    return PromptArms(target, [read], options.num_tokens, num_plain, options.seed + number)


def shown(records: list[Record], options: Options) -> Iterator[Record]:
    """Yield the paper's table and its details."""
    table, arms = GRIFFIN_TABLES[options.table], [record for record in records if "tree" in record]
    trained = [record for record in records if "drawn_at" in record]
    yield {"words": f"{table.title}. {table.note}"}
    if table.layout == "forwards":
        yield from trained
        return
    if table.layout == "order":
        yield from _order(table, arms, trained)
    else:
        cells = [each | {"arm": f"T = {each['temperature']:g} {each['tree']}"} for each in arms]
        yield from pivot(cells, ["row"], "arm", ["speedup", "tokens_per_step"])
    yield from only(arms, TIMES)
    yield {
        "words": "Speed-up by appendix H's formula, as if a tree cost what a row costs and as it does, and as measured"
    }
    yield from only(arms, FORMULA)


def _order(table: GriffinTable, arms: list[Record], trained: list[Record]) -> Iterator[Record]:
    taus = {
        (t, row): [each["tokens_per_step"] for each in arms if (each["temperature"], each["row"]) == (t, row)]
        for t, row in product(TEMPERATURES, table.rows)
    }
    for (t, row), found in taus.items() if arms else ():
        own = [each for each in trained if each["row"] == row and each["drawn_at"] == f"T {t:g}"]
        shares = [each["accuracy"] for each in own], [each["num_rows"] for each in own]
        figures = {"tau": statistics.mean(found), "least": min(found), "most": max(found)}
        accuracy = statistics.fmean(*shares) if own else None
        yield {"row": row, "temperature": t} | figures | {"accuracy": accuracy}
    for t in TEMPERATURES if arms else ():
        columns = list(zip(*(taus[t, row] for row in table.rows), strict=True))
        num_held = sum(all(a > b for a, b in pairwise(column)) for column in columns)
        by_mean = sorted(table.rows, key=lambda row: -statistics.mean(taus[t, row]))
        words = f"T = {t:g}: tau falls in the paper's order with {num_held} of {len(columns)} seeds; by its mean: "
        yield {"words": words + " > ".join(by_mean)}
