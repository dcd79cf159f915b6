"""GPU rounds over partial caches in slots equal the CPU's."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.forward.forward_interface import SparseRows, partial_rows
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.sparse_arena import SlotEntries
from swiftbatch.worker.kv.sparse_cache import NewEntries, SparseCache
from swiftbatch.worker.model.decoder_loading import dense_weights
from swiftbatch.worker.model.model_files import ModelFiles
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence
from tests.worker.forward.cuda.cuda_parts import cuda_target
from tests.worker.kernels.kernel_parts import random_tree
from tests.worker.kernels.reference import ReferenceDecoder
from tests.worker.kv.cache_parts import EverythingCache

pytestmark = pytest.mark.long

NUM_ENTRIES = (1, 70, 128)  # per sequence: prefixes end inside blocks and at their ends
LONGEST = 150


@pytest.fixture(scope="module")
def target(files: ModelFiles) -> TargetModel:
    return cuda_target(files, torch.float32, len(NUM_ENTRIES), LONGEST, "cublas")


@pytest.fixture(scope="module")
def reference(files: ModelFiles) -> ReferenceDecoder:
    weights = dense_weights(files, torch.float32)
    assert weights is not None
    return ReferenceDecoder(weights)


def everything(shape: CacheShape, budget: int, sequence: Sequence, new_entries: NewEntries, /) -> EverythingCache:
    return EverythingCache(shape, budget, new_entries)


def room_in(target: TargetModel) -> NewEntries:
    room = target.forwards.room_for(everything, LONGEST)
    arena = room.__self__  # type: ignore[attr-defined]
    arena.buffer.fill_(float("nan"))
    return room


def filled(cache: SparseCache, num_entries: int, seed: int, is_biased: bool) -> SparseCache:
    """The noise depends on the seed alone."""
    shape, noise = cache.shape, torch.Generator().manual_seed(seed)
    for layer in range(shape.num_layers):
        key, value = torch.randn(2, shape.num_kv_heads, num_entries, shape.head_dim, generator=noise)
        cache.write(layer, 0, key, value)
    cache._num_sequence_entries = num_entries
    cache.bias = np.linspace(-2, 3, num_entries * 2 // 3, dtype=np.float32) if is_biased else None
    return cache


def caches_of(shape: CacheShape, room: NewEntries | None, is_biased: bool = True) -> list[SparseCache]:
    """The second of three has no biases."""
    made = []
    for seed, num_entries in enumerate(NUM_ENTRIES):
        cache = EverythingCache(shape, LONGEST) if room is None else EverythingCache(shape, LONGEST, room)
        made.append(filled(cache, num_entries, seed, is_biased and seed != 1))
    return made


def rows_of(caches: list[SparseCache], num_nodes: int, seed: int, vocab: int) -> list[SparseRows]:
    numbers = random.Random(seed)
    return [
        partial_rows(cache, numbers.randrange(vocab), cache.num_entries + 9, random_tree(numbers, num_nodes, 0, vocab))
        for cache in caches
    ]


def is_near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).abs().max() <= 5e-6 * expected.abs().max())


def test_rounds_of_several_sequences_say_what_they_say_on_a_cpu(
    target: TargetModel, reference: ReferenceDecoder
) -> None:
    shape, vocab = target.cache_shape, target.vocab_size
    ours, theirs = caches_of(shape, room_in(target)), caches_of(shape, None)
    numbers = random.Random(1)
    for seed, num_nodes in enumerate((0, 21)):  # the second round has more rows than one forward
        rows, expected_rows = (rows_of(caches, num_nodes, seed, vocab) for caches in (ours, theirs))
        outputs = target.check(rows)
        hidden, logits = reference.forward(expected_rows)
        assert hidden is not None
        assert logits is not None
        assert is_near(torch.cat([each.hidden for each in outputs]), hidden)
        assert is_near(torch.cat([each.logits for each in outputs]), logits)
        path = sorted(numbers.sample(range(num_nodes), min(num_nodes, 3)))
        for mine, its in zip(ours, theirs, strict=True):
            mine.keep(path)
            its.keep(path)
            assert mine.num_entries == its.num_entries
            kept = mine._buffer[..., : mine.num_entries, :]
            assert is_near(kept, its._buffer[..., : its.num_entries, :])


def test_hidden_states_of_a_round_stay_and_its_logits_are_drawn_from_in_place(target: TargetModel) -> None:
    caches = caches_of(target.cache_shape, room_in(target))[:1]
    [first] = target.check(rows_of(caches, 2, 0, target.vocab_size))
    hidden, buffer = first.hidden.clone(), target.forwards.new_batch_sampler()._graphs.logits  # type: ignore[attr-defined]
    assert first.logits.data_ptr() == buffer.data_ptr()
    target.check(rows_of(caches, 2, 1, target.vocab_size))
    assert torch.equal(first.hidden, hidden)


def test_biases_of_a_job_are_gone_when_another_has_its_slot(target: TargetModel, reference: ReferenceDecoder) -> None:
    room = room_in(target)
    caches = caches_of(target.cache_shape, room)
    slots = {cache.entries.slot for cache in caches if isinstance(cache.entries, SlotEntries)}
    assert slots == {0, 1, 2}
    del caches
    rows = rows_of(caches_of(target.cache_shape, room, is_biased=False), 0, 3, target.vocab_size)
    expected = reference.forward(rows_of(caches_of(target.cache_shape, None, is_biased=False), 0, 3, target.vocab_size))
    assert expected[1] is not None
    assert is_near(torch.cat([each.logits for each in target.check(rows)]), expected[1])


def test_queries_are_the_same_and_no_launch_of_theirs_allocates(target: TargetModel, files: ModelFiles) -> None:
    found = []
    for each in (target, TargetModel.load(files, "float32", "cpu")):
        cache = each.new_cache(100)
        while cache.length < 70:
            each.read(cache, list(range(5, 75))[cache.length :])
        found.append(each.queries(cache, 9).clone())
    assert found[0].shape == found[1].shape
    assert is_near(*found)


def test_a_job_of_one_token_finds_room(target: TargetModel) -> None:
    sequence = Sequence("a", [1], SamplingParams(max_tokens=1), target.vocab_size)
    cache = everything(target.cache_shape, sequence.max_length, sequence, room_in(target))
    [outputs] = target.check([partial_rows(cache, 3, 0, DraftTree())])
    assert outputs.logits.isfinite().all()
