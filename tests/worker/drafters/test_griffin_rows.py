"""The kernels run GRIFFIN's draft model as torch does, with exact rows, and the target is not loaded a second time."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jobs.sampling import SamplingParams
from tests.worker.drafters.drafter_parts import free_rows
from tests.worker.drafters.griffin_parts import WAYS, by_kernels, load, random_draft_model, random_tokens
from tests.worker.kernels.kernel_parts import needs_kernels, random_tree
from worker.bench.variants import create_bench_drafter
from worker.caches.full import FullKVCache
from worker.drafters.griffin.model import SECOND_FUSIONS, GriffinConfig, GriffinModel
from worker.drafters.griffin.rows import GriffinRows, NativeRows, TiledRows, rows_of
from worker.engine import Engine
from worker.sequence import Sequence
from worker.target.loading import load_transformers
from worker.target.target import TargetModel
from worker.target.tiles import SequenceRows, tree_rows

TOLERANCES = {"float32": 1e-5, "bfloat16": 0.05}


@pytest.fixture(scope="module", params=TOLERANCES)
def small_target(request: pytest.FixtureRequest, tiny_model: Path) -> TargetModel:
    return load(tiny_model, request.param)


def draft_model(target: TargetModel, config: GriffinConfig) -> GriffinModel:
    """Random weights, norms and head included: at their initial ones and zeros a mistake in them would not show."""
    torch.manual_seed(2)
    model = GriffinModel(config)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter += (0.2 if parameter.ndim == 1 else 0.05) * torch.randn_like(parameter)
    return model.to(target.dtype).eval()


def random_rows(numbers: random.Random, rows: GriffinRows, length: int, vocab: int) -> SequenceRows:
    cache = FullKVCache(rows.cache_shape, 600)
    noise = torch.randn(cache._buffer.shape, generator=torch.Generator().manual_seed(length))
    cache._buffer.copy_(noise.to(cache._buffer.dtype))
    cache.advance(length)
    return tree_rows(cache, numbers.randrange(vocab), random_tree(numbers, 20, length, vocab))


def features_of(groups: list[SequenceRows], target: TargetModel) -> torch.Tensor:
    num_rows, generator = sum(map(len, groups)), torch.Generator().manual_seed(4)
    return torch.randn(num_rows, target.hidden_size, generator=generator).to(target.dtype)


@needs_kernels
@pytest.mark.parametrize("fusion", SECOND_FUSIONS)
@pytest.mark.parametrize("expansion_size", [0, 96])
@pytest.mark.parametrize("has_head", [True, False])
def test_kernels_and_torch_say_the_same_of_every_variant(
    small_target: TargetModel, fusion: str, expansion_size: int, has_head: bool
) -> None:
    config = GriffinConfig.for_target(small_target.model.config)
    config = replace(config, fusion=fusion, expansion_size=expansion_size, has_token_enhanced_head=has_head)
    model, outputs = draft_model(small_target, config), []
    for way in WAYS.values():
        rows, numbers = way(model, small_target), random.Random(1)
        groups = [random_rows(numbers, rows, length, small_target.vocab_size) for length in (0, 130)]
        found = rows.run(groups, features_of(groups, small_target))
        outputs.append((*found, groups[1].cache._buffer[..., 130 : 130 + len(groups[1]), :]))
    tolerance = TOLERANCES[str(small_target.dtype).removeprefix("torch.")]
    for ours, theirs in zip(*outputs, strict=True):
        assert float((ours.float() - theirs.float()).std() / theirs.float().std()) < tolerance


@pytest.mark.parametrize("way", WAYS)
def test_a_row_has_the_same_bits_alone_and_among_other_sequences(small_target: TargetModel, way: str) -> None:
    rows = WAYS[way](random_draft_model(small_target), small_target)
    groups = [random_rows(random.Random(n), rows, n, small_target.vocab_size) for n in (0, 40, 300)]
    features = features_of(groups, small_target)
    together = [each.split([len(group) for group in groups]) for each in rows.run(groups, features)]
    for number, group in enumerate(groups):
        alone = rows.run([group], features.split([len(each) for each in groups])[number])
        assert torch.equal(alone[0], together[0][number])
        assert torch.equal(alone[1], together[1][number])
        first = rows.run([group.part(0, 1)], features.split([len(each) for each in groups])[number][:1])
        assert torch.equal(first[1], together[1][number][:1])


@needs_kernels
def test_the_kernels_serve_where_the_target_runs_on_them_and_take_the_sizes(tiny_model: Path) -> None:
    target = load(tiny_model)
    config = GriffinConfig.for_target(target.model.config)
    assert isinstance(rows_of(draft_model(target, config), target), NativeRows)
    for other in ({"head_dim": 48}, {"expansion_size": 100}, {"intermediate_size": 100}):
        assert isinstance(rows_of(draft_model(target, replace(config, **other)), target), TiledRows)
    in_torch = TargetModel(load_transformers(target.files, target.dtype, target.device), target.files)
    assert isinstance(rows_of(draft_model(target, config), in_torch), TiledRows)


@needs_kernels
def test_features_of_another_shape_or_dtype_are_refused(tiny_model: Path) -> None:
    target = load(tiny_model)
    rows = by_kernels(random_draft_model(target), target)
    group = random_rows(random.Random(1), rows, 5, target.vocab_size)
    for shape, dtype in (((len(group) + 1, 64), torch.bfloat16), ((len(group), 64), torch.float32)):
        with pytest.raises(ValueError, match="found features"):
            rows.run([group], torch.zeros(shape, dtype=dtype))


@needs_kernels
@pytest.mark.parametrize("engine_name", ["griffin", "griffin-paper"])
def test_the_target_is_not_loaded_a_second_time(tiny_model: Path, engine_name: str) -> None:
    target = load(tiny_model)
    engine = Engine(target, create_bench_drafter(engine_name, target, free_rows))
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=5, ignore_eos=True)
    sequence = Sequence("a", random_tokens(target, 70), params, target.vocab_size)
    engine.start(sequence)
    while sequence.finish_reason is None:
        engine.step()
    assert "transformers" not in vars(target)
