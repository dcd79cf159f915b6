"""GRIFFIN's table: what it compares, and what its figures count."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from bench.ablation_arms import PromptArms, read_prompt
from bench.griffin_tables import ROWS, GriffinFigures, predicted_speedup
from bench.variants import create_bench_drafter
from swiftbatch.worker.drafters.autoregressive import AutoregressiveDrafter
from swiftbatch.worker.drafters.drafter_interface import Drafter, DraftRequest
from swiftbatch.worker.drafters.griffin.griffin import GriffinDrafter
from swiftbatch.worker.drafters.griffin.griffin_model import GriffinModel
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.training.griffin_recipe import GRIFFIN_RECIPE
from tests.simulated_clock import SimulatedClock
from tests.worker.drafters.drafter_parts import free_rows
from tests.worker.drafters.griffin.griffin_training_parts import EAGLE2_RECIPE, HASS_RECIPE

PREFILL = 70


@pytest.fixture(scope="module")
def tiny_target(tiny_model: Path) -> TargetModel:
    return TargetModel.load(locate_model(str(tiny_model)), "bfloat16", "cpu")


def test_rows_differ_in_what_the_table_is_about_and_are_the_paper_s_recipes() -> None:
    recipes = {row: replace(GRIFFIN_RECIPE, **variant.changes) for row, variant in ROWS.items()}
    assert list(recipes) == ["GRIFFIN", "w/o TAT", "w/o TAD", "w/o both (EAGLE-2)", "HASS (ours, added)"]
    assert recipes["w/o both (EAGLE-2)"] == EAGLE2_RECIPE
    assert recipes["HASS (ours, added)"] == HASS_RECIPE
    assert recipes["GRIFFIN"] == GRIFFIN_RECIPE
    fields = [asdict(each) for each in recipes.values()]
    differing = {name for name in fields[0] if len({str(each[name]) for each in fields}) > 1}
    assert differing == {"num_passes", "align_top_k", "fusion", "has_token_enhanced_head"}
    assert len({variant.name for variant in ROWS.values()}) == len(set(recipes.values())) == len(ROWS)


def test_the_formula_gives_the_paper_s_number() -> None:
    assert round(predicted_speedup(25.0, 25.0, 6, 1.5, 5.0), 2) == 3.68
    assert predicted_speedup(25.0, 41.0, 6, 1.5, 5.0) == 2.5  # a tree that costs more than one row


class Oracle(Drafter):
    """Knows what comes and drafts three tokens of it."""

    def __init__(self, output_ids: np.ndarray) -> None:
        self._output_ids = output_ids  # [num_generated]

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        return [self._chain(request.sequence, request.max_depth) for request in requests]

    def _chain(self, sequence: Sequence, max_depth: int) -> DraftTree:
        coming = self._output_ids[sequence.num_generated_tokens :][: min(3, max_depth)]
        return DraftTree.chain(coming.tolist())


def arms_behind(target: TargetModel, seed: int) -> PromptArms:
    ids = np.random.default_rng(seed).integers(3, target.vocab_size, PREFILL).tolist()
    return PromptArms(target, [read_prompt(target, ids, 40)], 40, 40, seed)


def test_tau_is_tokens_over_steps_of_all_prompts_behind_their_first_steps(tiny_target: TargetModel) -> None:
    pairs = []
    for seed in (0, 1):
        arms = arms_behind(tiny_target, seed)
        [said] = arms.run(AutoregressiveDrafter(), 1.0)[0].token_ids
        pairs.append(arms.run(Oracle(said) if seed else AutoregressiveDrafter(), 1.0))
    first, second, both = (GriffinFigures.of(chosen) for chosen in (pairs[:1], pairs[1:], pairs))
    assert first.tokens_per_step == 1.0
    assert second.tokens_per_step == pytest.approx(4.0, abs=0.01)
    assert both.tokens_per_step == pytest.approx((39 + 36) / (39 + 9), abs=0.001)
    assert both.num_tokens == first.num_tokens + second.num_tokens == 39 + 36
    assert both.levels_per_step == both.level_ms == 0.0
    assert both.nodes_per_step == pytest.approx(27 / 48, abs=0.001)


def num_rows(groups: list[Any]) -> int:
    return sum(len(rows) for rows in groups)


def test_the_paper_s_trees_have_60_nodes_of_6_levels_and_times_are_those_of_the_steps(
    tiny_target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of the target takes 1 ms here, a forward of the draft model 2 ms, and all else nothing."""
    clock, arms = SimulatedClock(), arms_behind(tiny_target, 0)
    monkeypatch.setattr("swiftbatch.worker.engine.engine.MOST_STEPS", 1)  # each step is a call that takes its time
    drafter = create_bench_drafter("griffin-paper", tiny_target, free_rows)
    assert isinstance(drafter, GriffinDrafter)
    clock.rule(monkeypatch)
    verify = clock.taking(lambda groups: 0.001 * num_rows(groups), tiny_target.verify)
    monkeypatch.setattr(tiny_target, "verify", verify)
    for forward in ("follow", "expand"):
        timed = clock.taking(lambda parts: 0.002, getattr(drafter._forwards, forward))
        monkeypatch.setattr(drafter._forwards, forward, timed)
    figures = GriffinFigures.of([arms.run(drafter, 1.0)])
    assert 50 < figures.nodes_per_step <= 60
    assert 5 < figures.levels_per_step <= 6
    assert figures.level_ms == pytest.approx(2.0)
    assert figures.plain_verify_ms == pytest.approx(1.0)
    assert figures.verify_ms == pytest.approx(1 + figures.nodes_per_step)
    step_ms = figures.verify_ms + figures.levels_per_step * 2.0
    assert figures.ms_per_token == pytest.approx(step_ms / figures.tokens_per_step, rel=0.001)
    assert figures.speedup == pytest.approx(1 / figures.ms_per_token, rel=0.01)
    assert figures.predicted_tree_speedup == pytest.approx(figures.speedup, rel=0.01)
    predicted = predicted_speedup(1.0, 1.0, figures.levels_per_step, 2.0, figures.tokens_per_step)
    assert figures.predicted_speedup == pytest.approx(predicted, rel=0.001)


def test_every_row_has_a_draft_model_that_runs(tiny_model: Path) -> None:
    target = AutoConfig.from_pretrained(tiny_model)
    for variant in ROWS.values():
        rows = torch.zeros(1, 3, 64)
        model = GriffinModel(replace(GRIFFIN_RECIPE, **variant.changes).config(target))
        model.set_attention("eager")
        assert model(rows, rows, torch.arange(3)[None], attention_mask=None)[0].shape == rows.shape
        assert (model.fusion.down is None) == ("fusion" in variant.changes)
        assert (model.head is None) == (variant.changes.get("has_token_enhanced_head") is False)
