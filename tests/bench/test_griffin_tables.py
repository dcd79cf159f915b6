from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from bench.griffin_ablation import Options, figures_of, predicted_speedup, recipe_of, shown
from bench.griffin_tables import GRIFFIN_TABLES, Variant
from bench.prompt_arms import Prompt, PromptArms, read_prompt
from bench.variants import create_bench_drafter
from swiftbatch.worker.drafters.drafter_interface import AutoregressiveDrafter
from swiftbatch.worker.drafters.griffin.griffin import GriffinDrafter
from swiftbatch.worker.drafters.griffin.griffin_model import GriffinModel
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.training.recipes import GRIFFIN_RECIPE, GriffinRecipe
from swiftbatch.worker.training.train_griffin import config_of
from tests.bench.test_prompt_arms import Oracle
from tests.simulated_clock import SimulatedClock
from tests.worker.drafters.drafter_parts import free_rows
from tests.worker.drafters.griffin.griffin_training_parts import EAGLE2_RECIPE, HASS_RECIPE

PREFILL = 70


@pytest.fixture(scope="module")
def tiny_target(tiny_model: Path) -> TargetModel:
    return TargetModel.load(locate_model(str(tiny_model)), "bfloat16", "cpu")


def all_variants() -> list[Variant]:
    return [variant for table in GRIFFIN_TABLES.values() for variant in table.rows.values()]


def recipe(variant: Variant, tiny_model: Path) -> GriffinRecipe:
    return recipe_of(variant, GRIFFIN_RECIPE, 0, AutoConfig.from_pretrained(tiny_model))


def test_tables_have_the_rows_of_the_paper() -> None:
    rows = {name: list(table.rows) for name, table in GRIFFIN_TABLES.items()}
    assert rows["1"] == rows["9"] == ["EAGLE-2", "HASS", "GRIFFIN"]
    assert rows["1b"] == [f"{method}, N = {n}" for method in ("HASS", "GRIFFIN") for n in range(1, 6)]
    assert rows["10"] == ["GRIFFIN", "w/o feature loss"]
    assert rows["1c"] == ["EAGLE-2", "HASS", "GRIFFIN"]
    assert rows["2"] == ["GRIFFIN", "w/o TAT", "w/o TAD", "w/o both (EAGLE-2)", "HASS (ours, added)"]
    assert rows["3"] == ["NA", "1", "3", "5", "10"]
    assert rows["4"] == ["1", "2", "3", "4", "5"]
    assert rows["5"] == ["token (ours)", "feature", "fused"]
    assert rows["6"] == ["GRIFFIN", "ablation 1", "ablation 2", "ablation 3"]
    assert rows["7"] == ["hidden size", "feed-forward size (ours)", "twice that"]
    assert rows["8"] == ["GRIFFIN", "w/o TEH", "w/o TGF", "w/o both"]
    assert rows["order"] == ["GRIFFIN", "w/o head", "w/o fusion", "w/o alignment", "none of them (EAGLE-2)"]


@pytest.mark.parametrize(
    ("table", "about"),
    [
        ("1", {"num_passes", "align_top_k", "fusion", "has_token_enhanced_head"}),
        ("1b", {"num_passes", "align_top_k", "fusion", "has_token_enhanced_head"}),
        ("9", {"num_passes", "align_top_k", "fusion", "has_token_enhanced_head"}),
        ("10", {"feature_weight"}),
        ("1c", {"num_passes", "align_top_k", "fusion", "has_token_enhanced_head"}),
        ("2", {"num_passes", "align_top_k", "fusion", "has_token_enhanced_head"}),
        ("3", {"align_top_k"}),
        ("4", {"num_passes", "align_top_k"}),  # one pass has nothing to mask
        ("5", {"fusion"}),
        ("6", {"fusion", "expansion_size"}),
        ("7", {"expansion_size"}),
        ("8", {"fusion", "has_token_enhanced_head"}),
        ("order", {"num_passes", "align_top_k", "fusion", "has_token_enhanced_head"}),
    ],
)
def test_trainings_differ_in_what_the_table_is_about_and_in_nothing_else(
    table: str, about: set[str], tiny_model: Path
) -> None:
    recipes = [asdict(recipe(variant, tiny_model)) for variant in GRIFFIN_TABLES[table].rows.values()]
    assert {name for name in recipes[0] if len({str(each[name]) for each in recipes}) > 1} == about
    assert asdict(GRIFFIN_RECIPE) in recipes


def test_a_folder_s_name_stands_for_one_recipe_and_no_recipe_has_two(tiny_model: Path) -> None:
    recipes = {variant.name: recipe(variant, tiny_model) for variant in all_variants()}
    assert all(recipe(variant, tiny_model) == recipes[variant.name] for variant in all_variants())
    assert len(set(recipes.values())) == len(recipes) == 25


def test_recipes_are_the_paper_s(tiny_model: Path) -> None:
    settings = [recipe(variant, tiny_model) for variant in GRIFFIN_TABLES["1c"].rows.values()]
    assert settings == [EAGLE2_RECIPE, HASS_RECIPE, GRIFFIN_RECIPE]
    assert recipe_of(all_variants()[0], GRIFFIN_RECIPE, 3, AutoConfig.from_pretrained(tiny_model)).seed == 3
    steps = [recipe(variant, tiny_model).num_passes for variant in GRIFFIN_TABLES["4"].rows.values()]
    top_ks = [recipe(variant, tiny_model).align_top_k for variant in GRIFFIN_TABLES["3"].rows.values()]
    sizes = [recipe(variant, tiny_model).expansion_size for variant in GRIFFIN_TABLES["7"].rows.values()]
    assert (steps, top_ks) == ([1, 2, 3, 4, 5], [None, 1, 3, 5, 10])
    assert sizes == [64, None, 256]  # the tiny model has hidden 64, feed-forward 128


def test_figure_1b_has_a_row_of_every_n_and_a_column_of_every_method() -> None:
    rows = list(GRIFFIN_TABLES["1b"].rows)
    records = [
        {"row": row, "temperature": t, "tree": "paper", "prompts": "", "tokens_per_step": number + t / 2}
        for number, row in enumerate(rows)
        for t in (0.0, 1.0)
    ]
    found = [each for each in shown(records, Options(table="1b")) if "N" in each]
    columns = ("HASS, T = 0", "HASS, T = 1", "GRIFFIN, T = 0", "GRIFFIN, T = 1")
    assert found == [
        {"N": str(n)} | dict(zip(columns, (n - 1, n - 0.5, n + 4, n + 4.5), strict=True)) for n in range(1, 6)
    ]


def test_tables_1_and_9_have_columns_of_what_was_asked() -> None:
    for table, columns in (("1", ["chat", "prose"]), ("9", ["1", "8"])):
        records = [
            {"row": row, "temperature": 0.0, "tree": "paper", "prompts": name, "tokens_per_step": 2.0, "speedup": 1.5}
            for name in columns
            for row in ("PLD", "GRIFFIN")
        ]
        found = next(each for each in shown(records, Options(table=table)) if each.get("row") == "GRIFFIN")
        measures = ("speedup", "tokens_per_step") if table == "1" else ("speedup",)
        names = [f"{name} {measure}" for name in columns for measure in measures] if table == "1" else columns
        assert list(found) == ["row", "temperature", *names]
        assert found[names[0]] == 1.5


def test_the_formula_gives_the_paper_s_number() -> None:
    assert round(predicted_speedup(25.0, 25.0, 6, 1.5, 5.0), 2) == 3.68
    assert predicted_speedup(25.0, 41.0, 6, 1.5, 5.0) == 2.5  # a tree costs more than one row


def test_whether_the_paper_s_order_holds_is_said_for_every_temperature() -> None:
    records = []
    falling, swapped = [5.0, 4.0, 3.0, 2.0, 1.0], [5.0, 3.0, 4.0, 2.0, 1.0]
    for seed, at_0, at_1 in ((0, falling, swapped), (1, falling, swapped), (2, swapped, [3.5, *swapped[1:]])):
        for row, tau_0, tau_1 in zip(GRIFFIN_TABLES["order"].rows, at_0, at_1, strict=True):
            own = {"row": row, "seed": seed}
            records.append(own | {"drawn_at": "T 0", "accuracy": tau_0 / 10, "num_rows": 10})
            records += [
                own | {"tree": "paper", "temperature": t, "tokens_per_step": tau}
                for t, tau in ((0.0, tau_0), (1.0, tau_1))
            ]
    found = list(shown(records, Options(table="order", data=Path(), work=Path())))
    text = " ".join(record["words"] for record in found if "words" in record)
    assert "T = 0: tau falls in the paper's order with 2 of 3 seeds; by its mean: GRIFFIN > w/o head > w/o f" in text
    assert "T = 1: tau falls in the paper's order with 0 of 3 seeds; by its mean: GRIFFIN > w/o fusion > w/o h" in text
    [at_0, _] = [record for record in found if record.get("row") == "w/o head" and "tau" in record]
    assert (at_0["tau"], at_0["least"], at_0["most"]) == (pytest.approx(11 / 3), 3.0, 4.0)
    assert at_0["accuracy"] == pytest.approx(11 / 30)


def arms_behind(target: TargetModel, seed: int) -> PromptArms:
    ids = np.random.default_rng(seed).integers(3, target.vocab_size, PREFILL).tolist()
    return PromptArms(target, [read_prompt(target, Prompt(ids, []), 40)], 40, 40, seed)


def test_tau_is_tokens_over_steps_of_all_prompts_behind_their_first_steps(tiny_target: TargetModel) -> None:
    pairs = []
    for seed in (0, 1):
        arms = arms_behind(tiny_target, seed)
        said = arms.run(AutoregressiveDrafter(), 1.0)[0].token_ids()
        pairs.append(arms.run(Oracle(said) if seed else AutoregressiveDrafter(), 1.0))
    first, second, both = (figures_of(chosen) for chosen in (pairs[:1], pairs[1:], pairs))
    assert first["tokens_per_step"] == 1.0
    assert second["tokens_per_step"] == pytest.approx(4.0, abs=0.01)
    assert both["tokens_per_step"] == pytest.approx((39 + 36) / (39 + 9), abs=0.001)
    assert both["num_tokens"] == first["num_tokens"] + second["num_tokens"] == 39 + 36
    assert both["levels_per_step"] == both["level_ms"] == 0.0
    assert both["nodes_per_step"] == pytest.approx(27 / 48, abs=0.001)


def num_rows(groups: list[Any]) -> int:
    return sum(len(rows) for rows in groups)


def test_the_paper_s_trees_have_60_nodes_of_6_levels_and_times_are_those_of_the_steps(
    tiny_target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of the target takes 1 ms, a draft forward 2 ms, and nothing else takes time."""
    clock, arms = SimulatedClock(), arms_behind(tiny_target, 0)
    monkeypatch.setattr("swiftbatch.worker.engine.engine.MOST_STEPS", 1)  # each step is a call that takes its time
    drafter = create_bench_drafter("griffin-paper", tiny_target, free_rows)
    assert isinstance(drafter, GriffinDrafter)
    clock.rule(monkeypatch)
    verify = clock.taking(lambda groups, *_: 0.001 * num_rows(groups), tiny_target.verify)
    monkeypatch.setattr(tiny_target, "verify", verify)
    for forward in ("follow", "expand"):
        timed = clock.taking(lambda parts: 0.002, getattr(drafter._forwards, forward))
        monkeypatch.setattr(drafter._forwards, forward, timed)
    figures = figures_of([arms.run(drafter, 1.0)])
    assert 50 < figures["nodes_per_step"] <= 60
    assert 5 < figures["levels_per_step"] <= 6
    assert figures["level_ms"] == pytest.approx(2.0)
    assert figures["plain_verify_ms"] == pytest.approx(1.0)
    assert figures["verify_ms"] == pytest.approx(1 + figures["nodes_per_step"])
    step_ms = figures["verify_ms"] + figures["levels_per_step"] * 2.0
    assert figures["ms_per_token"] == pytest.approx(step_ms / figures["tokens_per_step"], rel=0.001)
    assert figures["speedup"] == pytest.approx(1 / figures["ms_per_token"], rel=0.01)
    assert figures["predicted_tree"] == pytest.approx(figures["speedup"], rel=0.01)
    predicted = predicted_speedup(1.0, 1.0, figures["levels_per_step"], 2.0, figures["tokens_per_step"])
    assert figures["predicted"] == pytest.approx(predicted, rel=0.001)


def test_every_row_has_a_draft_model_that_runs(tiny_model: Path) -> None:
    target = AutoConfig.from_pretrained(tiny_model)
    for variant in all_variants():
        config = config_of(recipe(variant, tiny_model), target)
        rows = torch.zeros(1, 3, 64)
        model = GriffinModel(config)
        model.set_attention("eager")
        assert model(rows, rows, torch.arange(3)[None], attention_mask=None)[0].shape == rows.shape
        assert (model.fusion.down is None) == ("fusion" in variant.changes and variant.changes["fusion"] == "none")
        assert (model.head is None) == (variant.changes.get("has_token_enhanced_head") is False)
