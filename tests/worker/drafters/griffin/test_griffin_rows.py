"""The kernels run GRIFFIN's draft model like torch, exactly per row."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.variants import create_bench_drafter
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.griffin.draft_forwards import NativeRows, TiledRows, rows_of
from swiftbatch.worker.drafters.griffin.draft_input import NUM_PLACES, Features
from swiftbatch.worker.drafters.griffin.griffin_model import SECOND_FUSIONS, GriffinConfig
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.forward.target_model import TargetModel, load_transformers
from swiftbatch.worker.sampling.sequence import Sequence
from tests.worker.drafters.drafter_parts import free_rows, run_to_ends
from tests.worker.drafters.griffin.griffin_parts import (
    WAYS,
    by_kernels,
    by_token,
    load,
    noisy_draft_model,
    random_draft_model,
    random_rows,
    random_tokens,
    regressed,
)
from tests.worker.kernels.kernel_parts import needs_kernels

TOLERANCES = {"float32": 1e-5, "bfloat16": 0.05}


@pytest.fixture(scope="module", params=TOLERANCES)
def small_target(request: pytest.FixtureRequest, tiny_model: Path) -> TargetModel:
    return load(tiny_model, request.param)


def check_kernels_say_what_torch_says(small_target: TargetModel, **changes: Any) -> None:
    config = replace(GriffinConfig.for_target(small_target.model.config), **changes)
    model, outputs = noisy_draft_model(small_target, config), []
    for way in WAYS.values():
        rows, numbers = way(model, small_target, small_target.vocab_size), random.Random(1)
        parts = [random_rows(numbers, rows, length, small_target) for length in (0, 130)]
        found = [torch.stack([by_token(row) for row in each]) for each in rows.run(parts)]
        written = parts[1].room.cache.rows.buffer[..., 130 : 130 + len(parts[1]), :]
        outputs.append((*found, *map(regressed, parts), written))
    tolerance = TOLERANCES[str(small_target.dtype).removeprefix("torch.")]
    for ours, theirs in zip(*outputs, strict=True):
        assert float((ours.float() - theirs.float()).std() / theirs.float().std()) < tolerance


@pytest.mark.sample(3)
@needs_kernels
@pytest.mark.parametrize("fusion", SECOND_FUSIONS)
@pytest.mark.parametrize("expansion_size", [0, 96])
@pytest.mark.parametrize("has_head", [True, False])
def test_kernels_and_torch_say_the_same_of_every_variant(
    small_target: TargetModel, fusion: str, expansion_size: int, has_head: bool
) -> None:
    check_kernels_say_what_torch_says(
        small_target, fusion=fusion, expansion_size=expansion_size, has_token_enhanced_head=has_head
    )


@needs_kernels
@pytest.mark.parametrize("change", [{}, {"has_attention_bias": True}, {"epsilon": 0.5}, {"rope_theta": 20.0}], ids=str)
def test_kernels_and_torch_say_the_same_of_a_layer_without_a_norm_in_front(
    small_target: TargetModel, change: dict[str, Any]
) -> None:
    check_kernels_say_what_torch_says(
        small_target, fusion="none", has_token_enhanced_head=False, has_input_norm=False, **change
    )


@pytest.mark.parametrize("way", WAYS)
def test_a_row_has_the_same_bits_alone_and_among_other_sequences(small_target: TargetModel, way: str) -> None:
    rows = WAYS[way](random_draft_model(small_target), small_target)
    parts = [random_rows(random.Random(n), rows, n, small_target) for n in (0, 40, 300)]
    together, features = rows.run(parts), [regressed(part) for part in parts]
    for number, part in enumerate(parts):
        assert rows.run([part]) == [together[number]]
        assert torch.equal(regressed(part), features[number])
        assert rows.run([part.part(0, 1)]) == [together[number][:1]]


@needs_kernels
def test_the_kernels_serve_where_the_target_runs_on_them_and_take_the_sizes(tiny_model: Path) -> None:
    target = load(tiny_model)
    config = GriffinConfig.for_target(target.model.config)
    assert isinstance(rows_of(noisy_draft_model(target, config), target, 3), NativeRows)
    for other in ({"head_dim": 48}, {"expansion_size": 100}, {"intermediate_size": 100}):
        assert isinstance(rows_of(noisy_draft_model(target, replace(config, **other)), target, 3), TiledRows)
    in_torch = TargetModel(load_transformers(target.files, target.dtype, target.device), target.files)
    assert isinstance(rows_of(noisy_draft_model(target, config), in_torch, 3), TiledRows)


@needs_kernels
def test_features_of_another_shape_or_dtype_are_refused(tiny_model: Path) -> None:
    target = load(tiny_model)
    rows = by_kernels(random_draft_model(target), target)
    part = random_rows(random.Random(1), rows, 5, target)
    for features in (torch.zeros(NUM_PLACES, 65, dtype=torch.bfloat16), torch.zeros(NUM_PLACES, 64)):
        wrong = replace(part, room=replace(part.room, features=Features(features)))
        with pytest.raises(ValueError, match="found features"):
            rows.run([wrong])


@needs_kernels
@pytest.mark.parametrize("engine_name", ["griffin", "griffin-paper"])
def test_the_target_is_not_loaded_a_second_time(tiny_model: Path, engine_name: str) -> None:
    target = load(tiny_model)
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=5, ignore_eos=True)
    sequence = Sequence("a", random_tokens(target, 70), params, target.vocab_size)
    run_to_ends(Engine(target, create_bench_drafter(engine_name, target, free_rows)), sequence)
    assert "transformers" not in vars(target)
