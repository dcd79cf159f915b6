from __future__ import annotations

import pytest
import torch

from swiftbatch.worker.kernels.cuda.kv_kernels import gather_entries, gather_range
from tests.worker.kernels.cuda.arena_parts import (
    CAPACITY,
    HEAD_DIM,
    NUM_HEADS,
    NUM_LAYERS,
    NUM_SLOTS,
    any_arena,
    in_pages,
    same_bits,
)

SHAPE = (NUM_LAYERS, 2, NUM_HEADS, 70, HEAD_DIM)  # more rows than one program's


def any_entries(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, CAPACITY, (NUM_LAYERS, NUM_HEADS, count), generator=generator, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("slot", range(NUM_SLOTS))
def test_each_heads_own_entries_are_gathered(slot: int, dtype: torch.dtype) -> None:
    arena, out, entries = any_arena(dtype), torch.zeros(SHAPE, dtype=dtype), any_entries(70)
    gather_entries(arena[:, :, slot], entries, out)
    for layer in range(NUM_LAYERS):
        for head in range(NUM_HEADS):
            assert same_bits(out[layer, :, head], arena[layer, :, slot, head, entries[layer, head].long()])


def test_entries_that_are_none_and_what_lies_around_stay_as_they_are() -> None:
    arena, buffer, entries = any_arena(), torch.ones(*SHAPE[:3], 100, HEAD_DIM, dtype=torch.bfloat16), any_entries(70)
    entries[:, :, 5] = -1
    out = buffer[:, :, :, 20:90]
    gather_entries(arena[:, :, 1], entries, out)
    assert (buffer[..., :20, :] == 1).all()
    assert (buffer[..., 90:, :] == 1).all()
    assert (out[..., 5, :] == 1).all()
    assert same_bits(out[1, 0, 1, 6], arena[1, 0, 1, 1, entries[1, 1, 6]])


@pytest.mark.parametrize(("first", "count"), [(0, 70), (13, 33), (CAPACITY - 1, 1)])
def test_consecutive_rows_are_gathered(first: int, count: int) -> None:
    arena, staging = any_arena(), torch.zeros(SHAPE, dtype=torch.bfloat16)
    out = staging[:, :, :, :count]
    gather_range(arena[:, :, 2], first, out)
    assert same_bits(out, arena[:, :, 2, :, first : first + count])
    assert (staging[:, :, :, count:] == 0).all()


def test_rows_in_pages_are_gathered_as_those_side_by_side() -> None:
    arena, entries, outs = any_arena(), any_entries(70), [torch.zeros(SHAPE, dtype=torch.bfloat16) for _ in range(4)]
    pool, pages = in_pages(arena[:, :, 1])
    gather_entries(arena[:, :, 1], entries, outs[0])
    gather_entries(pool, entries, outs[1], pages)
    gather_range(arena[:, :, 1], 13, outs[2])
    gather_range(pool, 13, outs[3], pages)
    assert same_bits(outs[0], outs[1])
    assert same_bits(outs[2], outs[3])
    with pytest.raises(ValueError, match="expected them within 0 to 90"):
        gather_range(pool, 21, outs[3], pages)


def test_values_alone_are_gathered_from_rows_that_have_no_keys() -> None:
    values, buffer, entries = any_arena()[:, 1, 2], any_arena().clone()[:, :, 0, :, :70], any_entries(70)
    keys = buffer[:, 0].clone()
    gather_entries(values[:, None], entries, buffer[:, 1:])
    assert same_bits(buffer[:, 0], keys)
    assert same_bits(buffer[1, 1, 1], values[1, 1, entries[1, 1].long()])


def test_no_rows_are_no_launch() -> None:
    out = torch.zeros(*SHAPE[:3], 0, HEAD_DIM, dtype=torch.bfloat16)
    gather_range(any_arena()[:, :, 0], CAPACITY, out)
    gather_entries(any_arena()[:, :, 0], any_entries(0), out)


def test_what_does_not_fit_is_refused() -> None:
    arena, out = any_arena(), torch.zeros(SHAPE, dtype=torch.bfloat16)
    for entries, rows in (
        (any_entries(69), out),
        (any_entries(70).long(), out),
        (any_entries(70), out.float()),
        (any_entries(70), out.transpose(3, 4)),
        (any_entries(70), out[:1]),
        (any_entries(70), out[:, :1]),
    ):
        with pytest.raises(ValueError, match="expected"):
            gather_entries(arena[:, :, 0], entries, rows)
    for first in (-1, CAPACITY - 69):
        with pytest.raises(ValueError, match="expected them within 0 to 90"):
            gather_range(arena[:, :, 0], first, out)
