"""Trains and compares the rows of the GRIFFIN paper's tables."""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, PreTrainedConfig

from bench.griffin_tables import GRIFFIN_TABLES, TEMPERATURES, GriffinTable, Plan, Variant
from bench.options import ALL, Ints, one_of
from bench.prompt_arms import Prompt, PromptArms, num_plain_tokens, read_prompt
from bench.tables import Curve, Record, only, pivot
from bench.tasks import OWN_TASKS, chat_ids, read_tasks
from swiftbatch.jobs.job import Message
from swiftbatch.scheduler.commands.options.option_types import say
from swiftbatch.worker.decode_bench import (
    BY_NAME,
    BenchError,
    BenchOptions,
    Contestant,
    bench_slots,
    check_length,
    digest,
    encode,
    read_text,
)
from swiftbatch.worker.drafters.drafter_interface import Drafter
from swiftbatch.worker.drafters.engine_options import GRIFFIN_PAPER, GriffinOptions, changed
from swiftbatch.worker.drafters.griffin.griffin import griffin
from swiftbatch.worker.drafters.griffin.griffin_model import GriffinConfig
from swiftbatch.worker.forward.step_costs import Costs, step_costs_of
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kv.gpu_memory_plan import SlotsWanted
from swiftbatch.worker.model.model_files import ModelFiles, locate_model
from swiftbatch.worker.text.tokenizer import TextCodec
from swiftbatch.worker.training.corpus import TEST
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
NUM_ORDER_SEEDS = 3  # trainings per row of table order


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


OPTIONS: dict[Plan, GriffinOptions] = {
    "own": GriffinOptions(),
    "paper": GRIFFIN_PAPER,
    "chain": changed(GRIFFIN_PAPER, {"max_depth": 2, "max_nodes": 2, "breadth": 1}),
}


class Options(BenchOptions):
    table: str = ALL  # a name in `GRIFFIN_TABLES`
    data: Path | None = None  # books to train on
    work: Path | None = None  # trainings are kept here for other tables
    draft_model: Path | None = None  # the trained part of tables 1 and 9 without data
    num_steps: int = GRIFFIN_RECIPE.num_steps
    num_own_texts: int = GRIFFIN_RECIPE.texts.num_own_texts
    num_seeds: int = NUM_ORDER_SEEDS  # of table order
    seed: int = 0
    text: Path | None = None  # books for the prompts, unseen in training
    tasks: Path = OWN_TASKS  # prompts of table 1, lines {category, prompt} or a benchmark's file
    num_prompts: int = 2  # in table 1 of each category
    batches: Ints = (1, 2, 4, 8)  # of table 9
    prefill: int = 2048
    num_tokens: int = 256  # more than the first step commits


CURVES = {"1b": Curve("N", tuple((f"HASS, T = {t:g}", f"GRIFFIN, T = {t:g}") for t in TEMPERATURES))}


def each_table(options: Options) -> list[Options]:
    """Return the options of each wanted table that can be had."""
    if options.table != ALL:
        return [options]
    names = [
        name
        for name, table in GRIFFIN_TABLES.items()
        if options.text is not None or not table.plans or table.layout == "tasks"
        if options.data is not None or not table.needs_data
    ]
    return [options.model_copy(update={"table": name}) for name in names]


class GriffinArm(NamedTuple):
    """A row's drafter: a trained part, or an engine without one."""

    row: str
    seed: int
    parts_folder: Path | None = None
    engine: str | None = None

    def new_drafter(self, target: TargetModel, costs: Costs, plan: Plan) -> Drafter:
        if self.engine is not None:
            return BY_NAME[self.engine](target, costs, None)
        return griffin(target, costs, self.parts_folder, OPTIONS[plan])


def run(options: Options, recipe: GriffinRecipe = GRIFFIN_RECIPE) -> Iterator[Record]:
    """Repeat a table or figure of the GRIFFIN paper: train what its rows compare, then let them draft.

    Trainings are kept in --work, one folder each, for other tables and after a kill. Every arm continues the same
    prompts, as plain decoding does, and must give the same tokens. Tables 1 and 9 also work without --data.

    \b
    Example:
      python -m bench papers griffin --table 2 --data books --text test.jsonl --work griffin --json table2.jsonl
    """
    table, files = one_of(GRIFFIN_TABLES, options.table), locate_model(options.model)
    prompts = _prompts(options, table, files) if table.plans else {}
    torch.set_num_threads(options.num_threads)  # for the trainings
    trainings = _trainings(options, table, files, recipe)
    for training in trainings:
        yield from _accuracies(training)
    if not prompts:
        return
    arms = [GriffinArm(row, options.seed, engine=engine) for row, engine in table.engines.items()]
    arms += [GriffinArm(each.row, each.seed, each.folder) for each in trainings]
    arms += [] if trainings else [GriffinArm("GRIFFIN", options.seed, options.draft_model)]
    target = options.load(files, _slots_wanted(options, prompts))
    costs = step_costs_of(target)
    for name, given in prompts.items():
        behind = [_read(options, target, batch, number) for number, batch in enumerate(given)]
        for arm, temperature, plan in product(arms, table.temperatures, table.plans):
            pairs = [each.run(arm.new_drafter(target, costs, plan), temperature) for each in behind]
            key = {"table": options.table, "row": arm.row, "prompts": name, "seed": arm.seed}
            yield key | {"temperature": temperature, "tree": plan} | figures_of(pairs)


Batch = list[Prompt]


def _trainings(options: Options, table: GriffinTable, files: ModelFiles, recipe: GriffinRecipe) -> list[Training]:
    """Train what a table compares. Raises ModelError, CorpusError, BenchError."""
    if options.data is None or options.work is None:
        if table.needs_data or options.data is not None:
            raise BenchError(f"table {options.table}: its rows are trained; name books and a folder: --data --work")
        return []
    if table.layout == "forwards" and not any(options.data.rglob(TEST)):
        raise BenchError(f"data {options.data}: no file matches {TEST}; figure 1c is measured on test books")
    options.work.mkdir(parents=True, exist_ok=True)
    texts = replace(recipe.texts, num_own_texts=options.num_own_texts)
    recipe = replace(recipe, num_steps=options.num_steps, texts=texts)
    seeds = range(options.seed, options.seed + (options.num_seeds if table.layout == "order" else 1))
    return train_variants(table.rows, seeds, files, options.data, options.work, recipe)


def _slots_wanted(options: Options, prompts: dict[str, list[Batch]]) -> SlotsWanted:
    batches = [batch for given in prompts.values() for batch in given]
    longest = max(len(prompt.token_ids) for batch in batches for prompt in batch)
    num_jobs = max(sum(map(len, given)) for given in prompts.values())
    return bench_slots(["griffin"], longest + options.num_tokens, num_jobs)


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


def _prompts(options: Options, table: GriffinTable, files: ModelFiles) -> dict[str, list[Batch]]:
    """Return batches of prompts by the column that they belong to. Raises BenchError."""
    if table.layout == "tasks":
        return _task_prompts(options, files)
    if table.layout != "batches":
        return {"": [[prompt] for prompt in _stretches(options, files, options.num_prompts)]}
    stretches = _stretches(options, files, max(options.batches))
    return {f"{size:,}": [stretches[:size]] for size in options.batches}


def _task_prompts(options: Options, files: ModelFiles) -> dict[str, list[Batch]]:
    """Return the first turns of some prompts of each category."""
    codec, chance = TextCodec(files), random.Random(options.seed)
    by_category = defaultdict[str, list[str]](list)
    for task in read_tasks(options.tasks):
        by_category[task.category].append(task.turns[0])
    found = {name: chance.sample(turns, min(options.num_prompts, len(turns))) for name, turns in by_category.items()}
    prompts = {
        name: [[Prompt(chat_ids(codec, [Message(role="user", content=turn)]), [])] for turn in turns]
        for name, turns in found.items()
    }
    check_length(files, max(len(p.token_ids) for given in prompts.values() for [p] in given), options.num_tokens)
    return prompts


def _stretches(options: Options, files: ModelFiles, number: int) -> list[Prompt]:
    """Take prompts from all over the text. Raises BenchError."""
    if options.text is None:
        raise BenchError(f"table {options.table}: its arms go on from a text; name one with --text FILE")
    check_length(files, options.prefill, options.num_tokens)
    ids = encode(files, read_text(options.text))
    between = len(ids) // number
    if between < options.prefill:
        raise BenchError(
            f"text {options.text}: it has {len(ids)} tokens, {number} prompts of {options.prefill} need "
            f"{number * options.prefill}"
        )
    return [Prompt(ids[i * between :][: options.prefill], []) for i in range(number)]


def _read(options: Options, target: TargetModel, batch: Batch, number: int) -> PromptArms:
    num_plain = num_plain_tokens(options.num_tokens, max(len(prompt.token_ids) for prompt in batch))
    read = [read_prompt(target, prompt, options.num_tokens) for prompt in batch]
    return PromptArms(target, read, options.num_tokens, num_plain, options.seed + number)


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
    elif table.layout == "steps":
        yield from _by_steps(arms)
    elif table.layout in ("tasks", "batches"):
        measures = ["speedup", "tokens_per_step"] if table.layout == "tasks" else ["speedup"]
        yield from pivot(arms, ["row", "temperature"], "prompts", measures)
        return  # the formula is for one sequence and one text
    else:
        cells = [each | {"arm": f"T = {each['temperature']:g} {each['tree']}"} for each in arms]
        yield from pivot(cells, ["row"], "arm", ["speedup", "tokens_per_step"])
    yield from only(arms, TIMES)
    yield {
        "words": "Speed-up by appendix H's formula, as if a tree cost what a row costs and as it does, and as measured"
    }
    yield from only(arms, FORMULA)


def _by_steps(arms: list[Record]) -> list[Record]:
    """Return accept lengths: a row per N, a column per method and temperature."""
    cells = []
    for each in arms:
        method, _, n = each["row"].partition(", N = ")
        cells.append(each | {"N": n, "method": f"{method}, T = {each['temperature']:g}"})
    return pivot(cells, ["N"], "method", ["tokens_per_step"])


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
