"""Attention with a stub of flash-attn's prefixes."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from swiftbatch.jobs.run.run_records import AttentionName, LinearName
from swiftbatch.worker.kernels.cuda.attention_backends import ATTENTION_KERNELS, FlashAttention
from swiftbatch.worker.kernels.cuda.cuda_decoder import CudaDecoder
from swiftbatch.worker.kernels.cuda.cuda_row_table import PageTable
from swiftbatch.worker.kernels.cuda.device_caches import DeviceCaches
from swiftbatch.worker.kernels.cuda.gemm import LINEAR_KERNELS
from swiftbatch.worker.kernels.cuda.stacked_weights import stacked_weights
from swiftbatch.worker.kernels.cuda.tree_attention import AttentionShape, KeptLayer
from swiftbatch.worker.kernels.gpu_kernel_choice import CudaKernels
from swiftbatch.worker.kernels.kernel_sizes import HEAD_BLOCKS, num_splits
from swiftbatch.worker.kv.gpu_memory_plan import PADDED_ROWS
from swiftbatch.worker.kv.kv_capacity import GPU_PAGE
from tests.worker.kernels.cuda import flash_stub
from tests.worker.kernels.cuda.arenas import CAPACITY, Arena, Placed, padded, random_rows
from tests.worker.kernels.cuda.launches import launched
from tests.worker.kernels.cuda.test_attention import SCALE, alone, exactly, num_rows_of, queries, written
from tests.worker.kernels.cuda.test_decoder import LAYER, run, upload
from tests.worker.kernels.kernel_parts import FLOAT32, Shape, random_weights, whole
from tests.worker.kernels.reference import ReferenceDecoder

pytestmark = pytest.mark.long

SHAPES = (
    Shape(),
    Shape(head_dim=128, num_kv_heads=2, group=4),
    Shape(head_dim=80, group=16),
    Shape(head_dim=96, num_kv_heads=2, group=3),
    Shape(head_dim=256, group=1),
)
SMALL = Shape(num_kv_heads=2, group=3)
CPU = torch.device("cpu")
LENGTHS = (0, 63, 64, 700)
PRODUCT, CALL = "aten.mm.out", "flash_attn_with_kvcache"
PAGES = "aten.index_select.out"  # once for all layers
BOUND = 2e-2  # of attention in bfloat16


@pytest.fixture(autouse=True)
def _stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    flash_stub.install(monkeypatch)
    return


def flash_of(arena: Arena) -> FlashAttention:
    shape = arena.shape
    attention = AttentionShape(shape.num_kv_heads, shape.group, shape.head_dim, shape.dtype)
    return FlashAttention(attention, dataclasses.replace(arena.layout, page=GPU_PAGE), SCALE, CPU)


def in_shuffled_pages(arena: Arena) -> tuple[KeptLayer, PageTable]:
    buffer, pages = arena.in_pages(GPU_PAGE)
    return KeptLayer(*buffer[1], pages=pages), pages


def attended(arena: Arena, sequences: Sequence[Placed], query: Tensor) -> Tensor:
    kept, pages = in_shuffled_pages(arena)
    attention, table, mixed = flash_of(arena), arena.table(sequences, pages), padded(query[:0])
    attention.put(query, table)
    attention.attend(0, kept, table, mixed)
    assert mixed[len(query) :].isnan().all()
    return mixed[: len(query)]


def worst_error(arena: Arena, sequences: Sequence[Placed]) -> float:
    query = queries(arena, num_rows_of(sequences))
    found = attended(arena, sequences, query).double()
    return float((found - exactly(arena, sequences, query)).abs().max())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_trees_of_four_sequences_are_as_in_float64(shape: Shape) -> None:
    arena, sequences = written(shape, LENGTHS, (3, 1, 9, 12), seed=1)
    assert worst_error(arena, sequences) < BOUND


@pytest.mark.sample(3)
@pytest.mark.parametrize("sizes", [(1,), (21,), (22,), (64,), (40, 24), (1, 1, 1, 1)], ids=str)
def test_any_rows_fit_into_groups(sizes: tuple[int, ...]) -> None:
    arena, sequences = written(SMALL, LENGTHS[::-1], sizes, 2)
    assert num_rows_of(sequences) == sum(sizes)
    assert worst_error(arena, sequences) < BOUND


def test_a_row_has_the_bits_of_plain_decoding_in_any_company_and_order() -> None:
    numbers = random.Random(5)
    arena, sequences = written(SMALL, (5, 100, 448, 700), (4, 14, 9, 22), seed=5)
    query = queries(arena, num_rows_of(sequences))
    together = attended(arena, sequences, query).split([len(rows) for rows, _ in sequences])
    parts = query.split([len(rows) for rows, _ in sequences])
    order = [2, 0, 3, 1]
    others = attended(arena, [sequences[each] for each in order], torch.cat([parts[each] for each in order]))
    for each, other in zip(order, others.split([len(parts[each]) for each in order]), strict=True):
        assert torch.equal(other, together[each])
    for each, rows in enumerate(sequences):
        for row in numbers.sample(range(len(rows[0])), 2):
            assert torch.equal(attended(*alone(arena, rows, row), parts[each][row : row + 1])[0], together[each][row])


def test_a_prefix_and_a_tail_are_weighed_by_natural_lse() -> None:
    """Both weigh the same and are far from values where base 2 would pass."""
    arena, sequences = written(SMALL, (128,), (1,), seed=3)
    arena.buffer[1, 0] *= 12
    query = queries(arena, 1)
    assert (attended(arena, sequences, query).double() - exactly(arena, sequences, query)).abs().max() < BOUND


def test_a_nan_that_a_row_sees_is_not_passed_over() -> None:
    arena, sequences = written(SMALL, (700, 128), (1, 1), seed=10)
    arena.buffer[1, 0, 0, 1, 5] = torch.nan
    mixed = attended(arena, sequences, queries(arena, 2))
    assert mixed[0, SMALL.group :].isnan().all()
    assert not mixed[0, : SMALL.group].isnan().any()
    assert not mixed[1].isnan().any()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_numerics_name_the_splits_that_are_cut(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    arena, sequences = written(Shape(head_dim=head_dim), (700,), (1,), seed=4)
    attention, asked = flash_of(arena), list[int]()

    def see(*args: Any, num_splits: int, **kwargs: Any) -> Any:
        asked.append(num_splits)
        return flash_stub.flash_attn_with_kvcache(*args, num_splits=num_splits, **kwargs)

    monkeypatch.setattr(attention, "_call", see)
    kept, pages = in_shuffled_pages(arena)
    attention.attend(0, kept, arena.table(sequences, pages), padded(queries(arena, 0)))
    assert asked == [num_splits(CAPACITY, HEAD_BLOCKS)]
    length = flash_stub.split_length(CAPACITY, head_dim, asked[0])
    assert attention.numerics == f"flash 2.8.3 prefixes in splits of {length}"


def test_queries_are_found_by_their_places() -> None:
    arena, sequences = written(SMALL, LENGTHS[::-1], (3, 22, 1), seed=6)
    attention, query, table = flash_of(arena), queries(arena, num_rows_of(sequences)), arena.table(sequences)
    attention.put(query, table)
    assert torch.equal(attention.heads()[table.packed[: len(query)].long()].flatten(1, 2), query)
    assert torch.equal(attention.heads()[0].flatten(0, 1), query[0])
    assert int((~attention.query.isnan()).all(-1).all(-1).sum()) == len(query) > 22


def test_biases_and_float32_are_refused() -> None:
    arena, sequences = written(SMALL, (64,), (1,), seed=7)
    kept = KeptLayer(*arena.buffer[1], torch.zeros(1, CAPACITY))
    with pytest.raises(ValueError, match="found a bias, which flash-attn does not add to scores"):
        flash_of(arena).attend(1, kept, arena.table(sequences), queries(arena, 0))
    arena, sequences = written(dataclasses.replace(SMALL, dtype=FLOAT32), (64,), (1,), seed=7)
    with pytest.raises(RuntimeError, match="only support fp16 and bf16"):
        attended(arena, sequences, queries(arena, 1))


def decoder_of(arena: Arena) -> tuple[CudaDecoder, list[list[int]]]:
    """Return a decoder over an arena's entries in shuffled pages, and the pages of its slots."""
    weights, (buffer, pages) = stacked_weights(random_weights(arena.shape), CPU), arena.in_pages(GPU_PAGE)
    caches, kernels = DeviceCaches(buffer[:, :, :1], 6000, pages), CudaKernels(attention="flash", linear="triton")
    decoder = CudaDecoder(weights, caches, kernels)
    return decoder, pages.numbers.tolist()


@pytest.mark.sample(2)
@pytest.mark.parametrize("shape", [SHAPES[1], Shape(head_dim=96, group=3, has_qk_norm=True)], ids=str)
def test_a_whole_decoder_is_as_the_reference_and_shows_the_same_queries(shape: Shape) -> None:
    arena, _ = written(shape, (5, 64, 300), (), seed=8)
    other, sizes = arena.copy(), (3, 25, 1)
    (decoder, pages), shown = decoder_of(arena), list[Tensor]()

    def show(layer: int, query: Tensor) -> None:
        if layer == 0:
            shown.append(query[0].clone())

    found = run(decoder, random_rows(random.Random(1), arena, sizes), show, pages)
    expected_rows = [rows for rows, _ in random_rows(random.Random(1), other, sizes)]
    for mine, its in zip(found, whole(ReferenceDecoder(random_weights(shape)).forward(expected_rows)), strict=True):
        assert (mine.float() - its.float()).abs().max() <= 0.03 * its.float().abs().max()
    in_order = CudaDecoder(decoder._weights, DeviceCaches(other.buffer, 6000), CudaKernels(linear="triton"))
    run(in_order, random_rows(random.Random(1), other, sizes), show)
    assert torch.equal(*shown)


def test_a_layer_is_ten_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, _ = written(SMALL, (100, 10), (), seed=9)
    decoder, pages = decoder_of(arena)
    upload(decoder, random_rows(random.Random(3), arena, (2, 1)), pages)
    others = {"prefix_split": CALL, "tail_merge": "tail_merge_packed", PRODUCT: "multiply_columns"}
    layer = [others.get(name, name) for name in LAYER]
    first = [part for name in layer for part in ((PAGES, name) if name == CALL else (name,))]
    assert launched(monkeypatch, decoder.forward) == ["embed_row", *first, *layer, "add_norm_row", others[PRODUCT]]


def test_catalogues_have_what_a_run_may_name() -> None:
    assert tuple(ATTENTION_KERNELS) == get_args(AttentionName) == tuple(PADDED_ROWS)
    assert {*LINEAR_KERNELS, "int8"} == {*get_args(LinearName)}
