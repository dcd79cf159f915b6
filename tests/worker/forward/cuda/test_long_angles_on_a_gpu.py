"""A job's length chooses longrope angles on a GPU too."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from swiftbatch.worker.forward.cuda.cuda_forwards import CudaForwards
from swiftbatch.worker.forward.forward_interface import partial_rows
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import tree_rows
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.model.model_files import ModelFiles
from swiftbatch.worker.sampling.draft_tree import DraftTree
from tests.worker.forward.cuda.cuda_parts import cuda_target
from tests.worker.kv.cache_parts import EverythingCache
from tests.worker.model.folders import saved_as
from tests.worker.model.long_angles import PHI4_MINI, SHORT_LENGTH, text

pytestmark = pytest.mark.long

SHORT_JOB, LONG_JOB = SHORT_LENGTH, SHORT_LENGTH + 1
ROUNDING = 3e-4  # of the greatest logit
NUM_TOKENS = 65  # over a boundary
TREE = DraftTree.chain([7])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return saved_as(PHI4_MINI, tmp_path_factory.mktemp("phi"))


@pytest.fixture(scope="module")
def on_cpu(files: ModelFiles) -> TargetModel:
    return TargetModel.load(files, "float32", "cpu")


def read(target: TargetModel, max_length: int, token_ids: Sequence[int]) -> FullKVCache:
    cache = target.new_cache(max_length)
    while cache.length < len(token_ids):
        target.read(cache, list(token_ids[cache.length :]))
    return cache


def is_near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).abs().max() < ROUNDING * expected.abs().max())


def test_short_and_long_jobs_side_by_side_say_what_they_say_on_a_cpu(files: ModelFiles, on_cpu: TargetModel) -> None:
    target = cuda_target(files, torch.float32, num_slots=2, longest_job=LONG_JOB, linear="cublas")
    assert isinstance(target.forwards, CudaForwards)
    assert len(target.forwards._decoder.turns[1]) == SHORT_LENGTH + target.forwards.arena.capacity
    expected, alone, caches = [], [], []
    for length in (SHORT_JOB, LONG_JOB):
        expected += [on_cpu.verify([tree_rows(read(on_cpu, length, text(NUM_TOKENS)), 5, TREE)])[0].logits]
        caches.append(read(target, length, text(NUM_TOKENS)))
        alone.append(target.verify([tree_rows(caches[-1], 5, TREE)])[0].logits.clone())
    together = [rows.logits.clone() for rows in target.verify([tree_rows(cache, 5, TREE) for cache in caches])]
    for mine, its, theirs in zip(together, alone, expected, strict=True):
        assert torch.equal(mine, its)
        assert is_near(mine, theirs)
    assert not is_near(*together)


def test_rows_behind_a_partial_cache_have_the_angles_of_their_job(files: ModelFiles) -> None:
    target = cuda_target(files, torch.float32, num_slots=1, longest_job=LONG_JOB, linear="cublas")
    new_entries = target.forwards.room_for(
        lambda shape, budget, sequence, new: EverythingCache(shape, budget, new), 100
    )
    for length in (SHORT_JOB, LONG_JOB):
        full = read(target, length, text(NUM_TOKENS))
        partial = EverythingCache(target.cache_shape, 100, new_entries)
        partial.follow(full, lambda position: torch.empty(0))
        checked = target.check([partial_rows(partial, 5, full.length, TREE)])[0].logits.clone()
        assert is_near(checked, target.verify([tree_rows(full, 5, TREE)])[0].logits)
        del full, partial
