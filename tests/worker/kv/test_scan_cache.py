"""A scanned cache keeps first and newest positions."""

from __future__ import annotations

import pytest
import torch

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.forward.forward_interface import partial_rows
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import tree_rows
from swiftbatch.worker.kernels.kv_codes import SCAN_CHUNK
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.scan_cache import MOST_ENTRIES, NUM_RECENT, ScanKVCache
from swiftbatch.worker.kv.sparse_cache import NUM_PINNED
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence
from tests.worker.kernels.kernel_parts import needs_kernels
from tests.worker.kv.cache_parts import random_cache

pytestmark = needs_kernels
SHAPE = CacheShape(num_layers=2, num_kv_heads=2, head_dim=16, dtype=torch.float32, device=torch.device("cpu"))
MAX_LENGTH = 4000
FIRST_SCAN = NUM_PINNED + SCAN_CHUNK + NUM_RECENT


@pytest.fixture
def full() -> FullKVCache:
    return random_cache(SHAPE, MAX_LENGTH)


def followed(full: FullKVCache, *lengths: int) -> ScanKVCache:
    cache = ScanKVCache(SHAPE, 64, Sequence("a", [0], SamplingParams(max_tokens=MAX_LENGTH - 1), 1))
    for length in lengths:
        full.roll_back(0)
        full.advance(length)
        cache.follow(full, lambda position: torch.empty(0))
    return cache


@pytest.mark.parametrize("length", [1, NUM_PINNED, 500, FIRST_SCAN - 1])
def test_a_short_text_is_there_as_a_whole(full: FullKVCache, length: int) -> None:
    cache = followed(full, length)
    assert cache.scanned is None
    assert cache.num_entries == length
    assert torch.equal(cache.layer(1)[0][:, :length], full.layer(1)[0][:, :length])


@pytest.mark.parametrize("lengths", [(3900,), (10, 1400, 2300, 2301, 3900), (FIRST_SCAN, 3900)], ids=str)
def test_whole_chunks_are_scanned_and_all_else_is_there(full: FullKVCache, lengths: tuple[int, ...]) -> None:
    cache = followed(full, *lengths)
    end = NUM_PINNED + (3900 - NUM_PINNED - NUM_RECENT) // SCAN_CHUNK * SCAN_CHUNK
    assert cache.scanned is not None
    assert cache.scanned.end == end  # type: ignore[attr-defined]
    seen = [*range(NUM_PINNED), *range(end, 3900)]
    assert cache.num_entries == len(seen) <= MOST_ENTRIES
    for part in range(2):
        assert torch.equal(cache.layer(1)[part][:, : len(seen)], full.layer(1)[part][:, seen])


def test_a_resumed_job_draws_from_the_same_bits(full: FullKVCache) -> None:
    step_by_step = followed(full, *range(1, 3900, 37), 3900)
    at_once = followed(full, 3900)
    for name in ("_codes", "_means", "_spreads", "_moments"):
        assert torch.equal(getattr(step_by_step.scanned, name), getattr(at_once.scanned, name)), name
    entries = slice(0, at_once.num_entries)
    assert step_by_step.num_entries == at_once.num_entries
    assert torch.equal(step_by_step._buffer[:, :, :, entries], at_once._buffer[:, :, :, entries])


def test_the_target_draws_nearly_what_it_draws_with_all_keys(target: TargetModel) -> None:
    """The text has the model's words after four chunks."""
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(3, target.vocab_size, (4600,), generator=generator).tolist()
    full = target.new_cache(len(prompt) + 40)
    while full.length < 4560:
        target.read(full, prompt[full.length : 4560])
    sequence = Sequence("a", prompt, SamplingParams(max_tokens=30), target.vocab_size)
    scanned = ScanKVCache(target.cache_shape, 256, sequence)
    away = {"scanned": 0.0, "entries alone": 0.0}
    for token in prompt[4560:]:
        scanned.follow(full, lambda position: torch.empty(0))
        keys = scanned.scanned
        assert keys is not None
        [exact] = target.verify([tree_rows(full, token, DraftTree())])
        expected = torch.softmax(exact.logits[0], dim=-1)
        for name, seen in (("scanned", keys), ("entries alone", None)):
            scanned.scanned = seen
            [found] = target.check([partial_rows(scanned, token, full.length, DraftTree())])
            away[name] += float((torch.softmax(found.logits[0], dim=-1) - expected).abs().sum()) / 2
        scanned.scanned = keys
        full.commit([])
    assert away["scanned"] / 40 < 0.03  # of the probability, on average
    assert away["scanned"] < 0.5 * away["entries alone"]
