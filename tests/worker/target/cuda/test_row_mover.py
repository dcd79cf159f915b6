"""Rows that are told to move end where indexing brings them, step after step, and no other row is touched."""

from __future__ import annotations

import random

import torch

from swiftbatch.worker.caches.arena import KVArena
from swiftbatch.worker.caches.full import CacheShape
from swiftbatch.worker.target.cuda.row_mover import RowMover

SHAPE = CacheShape(2, 2, 16, torch.float32, torch.device("cpu"))


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
