"""Accepted rows move as in worker/kv/full_cache.py, and no other row changes."""

from __future__ import annotations

import random

import pytest
import torch

from swiftbatch.worker.kernels.cuda.kv_kernels import PADDING, move_rows, moves_of
from swiftbatch.worker.kv.cache_rows import keep_path
from tests.worker.kernels.cuda.arena_parts import CAPACITY, NUM_SLOTS, any_arena, same_bits


def any_path(chance: random.Random, num_nodes: int) -> list[int]:
    """Return accepted nodes of a random tree, parents first."""
    path, node = [], -1
    while node < num_nodes - 1 and len(path) < 12:
        node = chance.randrange(node + 1, min(node + 4, num_nodes))
        path.append(node)
    return path[: chance.randrange(len(path) + 1)]


def table_of(moves: list[tuple[int, int, int]], chance: random.Random) -> torch.Tensor:
    """Return `[64, 3]`: moves mixed with padding, each slot's in order."""
    slots = [move[0] for move in moves] + [-1] * (64 - len(moves))
    chance.shuffle(slots)
    queues = {slot: iter([move for move in moves if move[0] == slot]) for slot in slots}
    return torch.tensor([next(queues[slot], PADDING) for slot in slots], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("seed", range(4))
def test_paths_are_kept_as_the_cache_keeps_them(seed: int, dtype: torch.dtype) -> None:
    chance, arena = random.Random(seed), any_arena(dtype)
    expected, moves = arena.clone(), []
    for slot in chance.sample(range(NUM_SLOTS), 2):
        root, path = chance.randrange(CAPACITY - 31), any_path(chance, 30)
        keep_path(expected[:, :, slot], root, path)
        moves += moves_of(slot, root, path)
    move_rows(arena, table_of(moves, chance))
    assert same_bits(arena, expected)


@pytest.mark.parametrize("path", [[1, 3], [2, 3, 4, 5], [0, 2, 3], list(range(1, 30)), [], [0, 1, 2]])
def test_a_target_may_be_the_source_of_another_move(path: list[int]) -> None:
    arena = any_arena()
    expected = arena.clone()
    keep_path(expected[:, :, 1], 7, path)
    move_rows(arena, table_of(moves_of(1, 7, path), random.Random(1)))
    assert same_bits(arena, expected)


def test_rows_that_stay_are_not_moved_and_paths_that_fall_are_refused() -> None:
    assert moves_of(2, 10, [0, 1, 4, 6]) == [(2, 15, 13), (2, 17, 14)]
    for path in ([3, 2], [1, 1], [-1, 2]):
        with pytest.raises(ValueError, match="expected them to increase"):
            moves_of(0, 10, path)


def test_shapes_that_do_not_fit_are_refused() -> None:
    arena, moves = any_arena(), torch.zeros(4, 3, dtype=torch.int32)
    for wrong in ((arena[0], moves), (arena[:, :, :1], moves), (arena.double(), moves), (arena, moves.long())):
        with pytest.raises(ValueError, match="expected"):
            move_rows(*wrong)
    with pytest.raises(ValueError, match="expected"):
        move_rows(arena, moves[:, :2])
