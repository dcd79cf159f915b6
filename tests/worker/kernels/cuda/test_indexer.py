"""Lists of chosen keys against an oracle, and decoders with indexers against the kernels in C."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from swiftbatch.worker.kernels.cuda import indexer_kernels
from swiftbatch.worker.kernels.cuda.cuda_decoder import CudaDecoder
from swiftbatch.worker.kernels.cuda.cuda_row_table import CudaRowTable
from swiftbatch.worker.kernels.cuda.device_caches import DeviceCaches
from swiftbatch.worker.kernels.cuda.gemm import triton_linear
from swiftbatch.worker.kernels.cuda.indexer_kernels import CudaIndexer
from swiftbatch.worker.kernels.cuda.stacked_weights import stacked_weights
from swiftbatch.worker.kernels.cuda.tree_attention import KeptLayer
from swiftbatch.worker.kernels.gpu_kernel_choice import CudaKernels
from swiftbatch.worker.kernels.kernel_sizes import BLOCK, NUM_ROWS
from tests.worker.kernels.cuda.arenas import CAPACITY, Arena, Placed, random_arena, random_rows
from tests.worker.kernels.cuda.launches import launched
from tests.worker.kernels.cuda.test_decoder import CPU, LAYER, NUM_POSITIONS, decoder_of, is_near, run, upload
from tests.worker.kernels.kernel_parts import (
    FLOAT32,
    INDEXED,
    VARIANTS,
    Shape,
    native,
    needs_kernels,
    random_partial_rows,
    random_weights,
    whole,
)

pytestmark = pytest.mark.long

SHAPE = INDEXED[1]
NUM_CHOSEN = 100
LENGTHS, SIZES = (3, 64, 98, 99, 100, 300, 900), (3, 2, 1, 1, 1, 6, 4)  # of texts and trees


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts take several steps of each kernel."""
    monkeypatch.setattr(indexer_kernels, "READ_AT_ONCE", 256)
    monkeypatch.setattr(indexer_kernels, "SPAN", 128)


def best(scores: Tensor, count: int) -> list[int]:
    """Return the positions of the best keys in order; zeros are equal, and ties go to the lower position."""
    found = (scores[:count] + 0.0).tolist()
    return sorted(sorted(range(count), key=lambda place: -found[place])[:NUM_CHOSEN])


def entries_of(arena: Arena, table: CudaRowTable[Tensor], row: int, pages: Tensor | None) -> list[int]:
    """Return the entries of all keys that a row sees, among all of the pool."""
    slot, boundary, length = table.rows[row, :3].tolist()
    tail = table.tail_slots[row, :length].tolist()
    if pages is None:
        return [slot * CAPACITY + entry for entry in (*range(boundary), *tail)]
    return [int(pages[slot, place // BLOCK]) * BLOCK + place % BLOCK for place in range(boundary)] + tail


SCORES = {
    "different": lambda generator: torch.randn(NUM_ROWS, CAPACITY, generator=generator),
    "few": lambda generator: torch.randint(-2, 3, (NUM_ROWS, CAPACITY), generator=generator) / 3.0,
    "near": lambda generator: 1.0 + torch.randint(0, 70, (NUM_ROWS, CAPACITY), generator=generator) * 2.0**-23,
    "zeros of both signs": lambda generator: torch.randn(NUM_ROWS, CAPACITY, generator=generator).sign() * 0.0,
    "below zero": lambda generator: -torch.rand(NUM_ROWS, CAPACITY, generator=generator).exp(),
    "equal": lambda generator: torch.full((NUM_ROWS, CAPACITY), 0.5),
    "infinite": lambda generator: torch.randn(NUM_ROWS, CAPACITY, generator=generator) * 1e39,
}


@pytest.mark.parametrize("has_pages", [False, True])
@pytest.mark.parametrize("name", SCORES)
def test_the_best_keys_are_listed_in_the_order_of_positions(name: str, has_pages: bool) -> None:
    arena = random_arena(SHAPE, LENGTHS)
    buffer, pages = arena.in_pages(BLOCK) if has_pages else (arena.buffer, None)
    table = arena.table(random_rows(random.Random(4), arena, SIZES), pages)
    kept = KeptLayer(buffer[0, 0], buffer[0, 0], pages=pages)
    sizes = random_weights(SHAPE).sizes
    assert sizes.indexer is not None
    indexer = CudaIndexer(sizes, sizes.indexer, triton_linear, CPU, CAPACITY, NUM_ROWS)
    indexer.scores.copy_(SCORES[name](torch.Generator().manual_seed(1)))
    indexer.list_best(kept, table)
    listed, found = indexer.chosen(kept, table)
    assert listed.pages is not None
    counts = []
    for row, (_, boundary, length, *_) in enumerate(table.rows.tolist()):
        group, prefix, rest = found.groups[row].tolist(), *found.rows[row, 1:3].tolist()
        assert group == [row, row, int(length > 0), prefix]
        assert found.rows[row, 0] == row
        known = entries_of(arena, table, row, None if pages is None else pages.numbers)
        expected = [known[each] for each in best(indexer.scores[row], len(known))]
        assert rest == (len(expected) - 1) % BLOCK + 1 if length else rest == prefix == 0
        assert [*listed.pages.numbers[row, :prefix].tolist(), *found.tail_slots[row, :rest].tolist()] == expected
        counts.append(boundary + length)
    assert min(counts) == 0 < max(counts) < CAPACITY
    assert {NUM_CHOSEN - 1, NUM_CHOSEN, NUM_CHOSEN + 1} <= set(counts)


@needs_kernels
@pytest.mark.parametrize("shape", INDEXED, ids=["bf16", "float32"])
def test_trees_are_as_in_the_kernels_in_c_and_the_same_keys_are_stored(shape: Shape) -> None:
    arena = random_arena(shape, (64, 300))
    other = arena.copy()
    found = run(decoder_of(arena, "triton"), random_rows(random.Random(1), arena, (2, 4)))
    rows = [each for each, _ in random_rows(random.Random(1), other, (2, 4))]
    expected = whole(native(shape, VARIANTS[0]).forward(rows))
    assert all(is_near(*pair, shape.dtype) for pair in zip(found, expected, strict=True))
    written = ~other.buffer.isnan()
    assert torch.equal(written, ~arena.buffer.isnan())
    assert is_near(arena.buffer[written], other.buffer[written], shape.dtype)
    assert not (arena.buffer[1, :, 1, :, 300:304, -48:] != 0).any(), "a layer without an indexer stores no key"
    assert arena.buffer[0, :, 1, :, 300:304, -48:].abs().min() > 0


def alone(decoder: CudaDecoder, placed: list[Placed], number: int) -> tuple[Tensor, Tensor]:
    for rows, slot in placed:
        if number < len(rows):
            return run(decoder, [(rows.part(number, number + 1), slot)])
        number -= len(rows)
    raise AssertionError("no such row")


@pytest.mark.parametrize("shape", [INDEXED[0], pytest.param(INDEXED[1], marks=pytest.mark.slow)], ids=str)
def test_rows_have_the_bits_that_they_have_alone_in_any_pages_and_in_narrower_forwards(shape: Shape) -> None:
    arena = random_arena(shape, (96, 300))
    weights, placed = stacked_weights(random_weights(shape), CPU), random_rows(random.Random(2), arena, (5, 3))
    buffer, pages = arena.in_pages(BLOCK)
    in_pages = CudaDecoder(
        weights, DeviceCaches(buffer[:, :, 0, None], NUM_POSITIONS, pages), CudaKernels(linear="triton")
    )
    wide = CudaDecoder(
        stacked_weights(random_weights(shape), CPU), DeviceCaches(arena.buffer, NUM_POSITIONS),
        CudaKernels(linear="triton", num_rows=128),
    )  # fmt: skip
    expected = run(wide, placed)
    numbers = [own.tolist() for own in pages.numbers]
    others = [run(wide.narrowed(64), placed), run(in_pages, placed, pages=[numbers[slot] for _, slot in placed])]
    for found in others:
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    for number in (1, 6):
        for mine, its in zip(alone(wide.narrowed(64), placed, number), expected, strict=True):
            assert torch.equal(mine[0], its[number])


def test_rows_behind_partial_caches_see_all_of_them() -> None:
    """So the indexer does not matter, and its keys neither."""
    plain = dataclasses.replace(
        SHAPE, head_dim=SHAPE.head_dim - 48, latent=dataclasses.replace(SHAPE.latent, indexer=None)  # type: ignore[type-var]
    )  # fmt: skip
    found, bias = [], torch.zeros(1, CAPACITY)
    weights = random_weights(SHAPE)
    for shape in (SHAPE, plain):
        arena = random_arena(SHAPE, (300,))
        buffer = arena.buffer[..., : shape.head_dim].contiguous()
        sizes = dataclasses.replace(weights.sizes, head_dim=shape.head_dim, latent=shape.latent)
        layers = [dataclasses.replace(layer, **no_indexer(shape)) for layer in weights.layers]
        stacked = stacked_weights(dataclasses.replace(weights, sizes=sizes, layers=layers), CPU)
        decoder = CudaDecoder(stacked, DeviceCaches(buffer, NUM_POSITIONS), CudaKernels(linear="triton"))
        rows = dataclasses.replace(random_partial_rows(random.Random(5), SHAPE, 300, 3), boundary=300)
        found.append(run(decoder.over(buffer, bias), [(rows, 0)]))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def no_indexer(shape: Shape) -> dict[str, Any]:
    assert shape.latent is not None
    if shape.latent.indexer is not None:
        return {}
    return dict.fromkeys(("index_query", "index_key", "index_weight", "index_norm"))


def test_an_indexer_is_five_launches_more_in_layers_that_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = dataclasses.replace(SHAPE, dtype=FLOAT32)
    arena = random_arena(shape, (100, 10))
    decoder = decoder_of(arena)
    upload(decoder, random_rows(random.Random(3), arena, (2, 1)))
    attention = ["latent_prefix_split", "latent_tail_merge", "multiply_heads", *LAYER[5:]]
    in_front = [*LAYER[:2], "keep_latent_row", "aten.mm.out", "multiply_heads"]
    chosen = ["aten.mm.out", "aten.mm.out", "ready_index_row", "score_span", "list_chosen"]
    names = ["embed_row", *in_front, *chosen, *attention, *in_front, *attention, "add_norm_row", "aten.mm.out"]
    assert launched(monkeypatch, decoder.forward) == names


def test_a_first_layer_without_an_indexer_is_refused() -> None:
    arena, weights = random_arena(SHAPE, (10,)), random_weights(SHAPE)
    stacked = stacked_weights(dataclasses.replace(weights, layers=weights.layers[::-1]), CPU)
    with pytest.raises(ValueError, match="found a first layer without an indexer"):
        CudaDecoder(stacked, DeviceCaches(arena.buffer, NUM_POSITIONS), CudaKernels())
