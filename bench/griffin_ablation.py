"""`python -m bench ablation griffin`: a table of the paper, whose rows are trained first and then let draft."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, model_validator
from rich.console import Group
from transformers import AutoConfig, PreTrainedConfig

from bench.ablation_arms import PromptArms, num_plain_tokens
from bench.ablation_prompts import Prompt, read_prompt
from bench.griffin_tables import (
    GRIFFIN_TABLES,
    MAX_FORWARDS,
    NUM_ORDER_SEEDS,
    TEMPERATURES,
    ArmKey,
    GriffinFigures,
    GriffinTable,
    Plan,
    Results,
    Training,
    Variant,
    render,
    summary,
)
from bench.long import Report
from bench.variants import GRIFFIN_PAPER as PAPER
from swiftbatch.worker.bench_texts import BenchError, encode, read_text
from swiftbatch.worker.decode_bench import BenchOptions, bench_slots, check_length
from swiftbatch.worker.drafters.griffin.griffin import GriffinOptions, griffin
from swiftbatch.worker.drafters.griffin.griffin_model import GriffinConfig
from swiftbatch.worker.forward.step_costs import step_costs_of
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import ModelFiles, locate_model
from swiftbatch.worker.training.griffin_features import TEST
from swiftbatch.worker.training.griffin_recipe import GRIFFIN_RECIPE, GriffinRecipe
from swiftbatch.worker.training.train_griffin import GriffinAccuracyRecord, griffin_folder, train_griffin

FEATURES = "features"  # beside the trainings, which share them


def train_variants(
    rows: dict[str, Variant],
    seeds: range,
    files: ModelFiles,
    data: Path,
    work: Path,
    recipe: GriffinRecipe,
    report: Callable[[str], None],
) -> list[Training]:
    """Train every row's draft model with every seed, where it is not there yet. Raises ModelError, CorpusError."""
    target = AutoConfig.from_pretrained(files.path, local_files_only=True, trust_remote_code=False)
    trainings = []
    for seed in seeds:
        for row, variant in rows.items():
            own = recipe_of(variant, recipe, seed, target)
            folder = work / f"{variant.name}-{seed}"
            report(f"{row}, seed {seed}: training in {folder}")
            train_griffin(files.name, data, folder, own, report, work / FEATURES)
            log = griffin_folder(folder, files.fingerprint, own).records()
            accuracy = [GriffinAccuracyRecord(**record) for record in log if record.get("when") == "after"]
            trainings.append(Training(row, seed, folder, own, accuracy))
    return trainings


def recipe_of(variant: Variant, base: GriffinRecipe, seed: int, target: PreTrainedConfig) -> GriffinRecipe:
    """A variant's recipe, which differs from `base` in what the variant changes and in the seed."""
    sizes = GriffinConfig.for_target(target)
    expansions = {"hidden": sizes.hidden_size, "double": 2 * sizes.intermediate_size}
    changes: dict[str, Any] = dict(variant.changes)
    if variant.expansion is not None:
        changes["expansion_size"] = expansions[variant.expansion]
    return replace(base, seed=seed, **changes)


OPTIONS: dict[Plan, GriffinOptions] = {"own": GriffinOptions(), "paper": PAPER}


class GriffinAblationOptions(BenchOptions):
    """The table asked for, what its rows learn from, and how many tokens each arm generates behind how many prompts."""

    table: str
    data: Path
    work: Path
    num_steps: int = Field(default=GRIFFIN_RECIPE.num_steps, ge=1)
    num_own_texts: int = Field(default=GRIFFIN_RECIPE.texts.num_own_texts, ge=0)
    num_seeds: int | None = Field(default=None, ge=1)
    seed: int = Field(ge=0)
    text: Path | None = None
    num_prompts: int = Field(ge=1)
    prefill: int = Field(ge=2)
    num_tokens: int = Field(gt=MAX_FORWARDS + 1)  # more than the first step commits

    @model_validator(mode="after")
    def _only_where_they_belong(self) -> GriffinAblationOptions:
        layout = self.layout.layout
        if self.num_seeds is not None and layout != "order":
            raise ValueError(f"table {self.table}: --seeds is for table order; the others take one --seed")
        if self.text is None and self.layout.plans:
            raise ValueError(f"table {self.table}: its arms go on from a text; name one with --text FILE")
        return self

    @property
    def layout(self) -> GriffinTable:
        return GRIFFIN_TABLES[self.table]

    @property
    def seeds(self) -> range:
        num_seeds = NUM_ORDER_SEEDS if self.layout.layout == "order" else 1
        return range(self.seed, self.seed + (self.num_seeds or num_seeds))


def run_griffin_ablation(
    options: GriffinAblationOptions, report: Report = lambda line: None, recipe: GriffinRecipe = GRIFFIN_RECIPE
) -> Group:
    """Train what is missing, run all arms and lay out the tables; JSON is written after each arm.

    `recipe` is what the trainings have in common beside the options. Raises BenchError, CorpusError, ModelError.
    """
    files = locate_model(options.model)
    prompts = _prompts(options, files)
    _make_folders(options)
    torch.set_num_threads(options.num_threads)  # for the trainings
    results = Results(_train(options, files, recipe, report))
    target = options.load(files, bench_slots(["griffin"], options.prefill + options.num_tokens, options.num_prompts))
    costs = step_costs_of(target)
    _save(options, results, target)
    behind = [_read(options, target, prompt, number, report) for number, prompt in enumerate(prompts)]
    for training, temperature, plan in product(results.trainings, TEMPERATURES, options.layout.plans):
        key, drafting = ArmKey(training.row, training.seed, temperature, plan), OPTIONS[plan]
        pairs = [arms.run(griffin(target, costs, training.folder, drafting), key.temperature) for arms in behind]
        results.figures[key] = GriffinFigures.of(pairs)
        report(summary(key, results.figures[key]))
        _save(options, results, target)
    return render(options.layout, results, _compared(options))


def _prompts(options: GriffinAblationOptions, files: ModelFiles) -> list[Prompt]:
    """Stretches from all over the text; none where no arm generates. Raises BenchError where the text is too short."""
    if options.text is None or not options.layout.plans:
        return []
    check_length(files, options.prefill, options.num_tokens)
    ids = encode(files, read_text(options.text))
    between = len(ids) // options.num_prompts
    if between < options.prefill:
        raise BenchError(
            f"text {options.text}: it has {len(ids)} tokens, {options.num_prompts} prompts of {options.prefill} need "
            f"{options.num_prompts * options.prefill}"
        )
    return [Prompt(ids[i * between :][: options.prefill], []) for i in range(options.num_prompts)]


def _make_folders(options: GriffinAblationOptions) -> None:
    """Make the folders that are written to, before anything takes long. Raises BenchError."""
    files = [path for path in (options.json_path,) if path is not None]
    for folder in [options.work, *(path.parent for path in files)]:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BenchError(f"{folder}: cannot be made a folder: {error.strerror}; name another one") from error


def _train(options: GriffinAblationOptions, files: ModelFiles, recipe: GriffinRecipe, report: Report) -> list[Training]:
    if options.layout.layout == "forwards" and not any(options.data.rglob(TEST)):
        raise BenchError(f"data {options.data}: no file matches {TEST}; figure 1c is measured on test books")
    texts = replace(recipe.texts, num_own_texts=options.num_own_texts)
    recipe = replace(recipe, num_steps=options.num_steps, texts=texts)
    return train_variants(options.layout.rows, options.seeds, files, options.data, options.work, recipe, report)


def _read(
    options: GriffinAblationOptions, target: TargetModel, prompt: Prompt, number: int, report: Report
) -> PromptArms:
    """Read one prompt; each prompt's arms draw with a seed of their own."""
    num_plain = num_plain_tokens(options.num_tokens, options.prefill)
    report(
        f"reading prompt {number + 1} of {options.num_prompts}: {options.prefill:,} tokens; each arm generates "
        f"{options.num_tokens} behind it, in turns with plain decoding of {num_plain}"
    )
    read = read_prompt(target, prompt, options.num_tokens)
    return PromptArms(target, [read], options.num_tokens, num_plain, options.seed + number)


def _compared(options: GriffinAblationOptions) -> str:
    num_plain = num_plain_tokens(options.num_tokens, options.prefill)
    return (
        f"Behind each of {options.num_prompts} prompts of {options.prefill:,} tokens: {options.num_tokens:,} with each "
        f"arm, in turns with plain decoding, which said the same {num_plain:,}."
    )


def _save(options: GriffinAblationOptions, results: Results, target: TargetModel) -> None:
    options.write(_documents(results), target)


def _documents(results: Results) -> dict[str, Any]:
    trainings = [asdict(training) | {"folder": training.folder.name} for training in results.trainings]
    arms = [key._asdict() | {"figures": figures.model_dump()} for key, figures in results.figures.items()]
    return {"trainings": trainings, "arms": arms}
