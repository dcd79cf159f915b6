"""Moved rows end as indexing would bring them."""

from __future__ import annotations

import random

import pytest
import torch

from swiftbatch.worker.kernels.cuda.cuda_graph import Graph, Repeated, Work
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.kv_capacity import MAX_TREE_NODES, PoolSize
from swiftbatch.worker.kv.slot_arena import KVArena
from swiftbatch.worker.kv.sparse_arena import RowMover

SHAPE = CacheShape(2, 2, 16, torch.float32, torch.device("cpu"))


class CountedGraphs:
    """Counts uncaptured work."""

    num_replays = 0

    def __call__(self, work: Work, device: torch.device) -> Graph:
        def replay() -> None:
            self.num_replays += 1
            work()

        return Repeated(replay)


@pytest.mark.parametrize("num_sequences", [2, 9])
def test_moves_of_all_sequences_of_a_step_are_one_launch_and_leave_what_indexing_leaves(num_sequences: int) -> None:
    """More than fit the table need two launches."""
    graphs, numbers = CountedGraphs(), random.Random(2)
    arenas = [KVArena(SHAPE, num_sequences, 300, PoolSize(num_sequences * 9, 64)) for _ in range(2)]
    arenas[0].buffer.normal_(generator=torch.Generator().manual_seed(0))
    arenas[1].buffer.copy_(arenas[0].buffer)
    arenas[1].move_rows = mover = RowMover(arenas[1].buffer, graphs)
    caches = [[arena.new_cache(300) for _ in range(num_sequences)] for arena in arenas]
    for each in (each for own in caches for each in own):
        each.reserve(200)
        each.advance(50)
    with mover.together():
        for plain, moved in zip(*caches, strict=True):
            path = sorted(numbers.sample(range(1, 40), 18))
            plain.commit(path)
            moved.commit(path)
        assert graphs.num_replays == 0
    assert graphs.num_replays == -(-18 * num_sequences // MAX_TREE_NODES)
    for plain, moved in zip(*caches, strict=True):
        assert plain.length == moved.length == 69
        assert torch.equal(plain.rows.between(slice(0, 69)), moved.rows.between(slice(0, 69)))
    caches[1][0].commit([2])  # a single one moves at once
    assert graphs.num_replays == 1 - (-18 * num_sequences // MAX_TREE_NODES)


def test_commits_of_two_sequences_leave_what_indexing_leaves() -> None:
    arenas = [KVArena(SHAPE, 2, 300) for _ in range(2)]
    noise = torch.randn(arenas[0].buffer.shape, generator=torch.Generator().manual_seed(0))
    for arena in arenas:
        arena.buffer.copy_(noise)
    arenas[1].move_rows = RowMover(arenas[1].buffer)
    caches = [[arena.new_cache(300) for _ in range(2)] for arena in arenas]
    numbers = random.Random(1)
    for step in range(12):
        path = sorted(numbers.sample(range(20), numbers.randrange(6)))
        for plain, moved in [tuple(pair[step % 2] for pair in caches)]:
            plain.commit(path)
            moved.commit(path)
            assert plain.length == moved.length
    kept = [cache.length for cache in caches[0]]
    assert min(kept) > 10
    for slot, length in enumerate(kept):
        plain, moved = (
            arena.buffer[:, :, cache[slot].slot, :, :length] for arena, cache in zip(arenas, caches, strict=True)
        )
        assert torch.equal(plain, moved)
