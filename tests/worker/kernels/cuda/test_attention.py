"""CUDA attention is near float64, with independent rows."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from swiftbatch.worker.forward.tile_packing import tree_rows
from swiftbatch.worker.kernels.cuda import tree_attention
from swiftbatch.worker.kernels.cuda.attention_backends import FlashAttention
from swiftbatch.worker.kernels.cuda.tree_attention import AttentionShape, KeptLayer, Scratch, attend
from swiftbatch.worker.kernels.kernel_sizes import BLOCK, HEAD_BLOCKS, NUM_ROWS, num_splits
from swiftbatch.worker.kernels.layer_specs import SEES_ALL, AttentionView
from swiftbatch.worker.sampling.draft_tree import DraftTree
from tests.worker.kernels.cuda.arenas import CAPACITY, NAN, Arena, Placed, padded, random_arena, random_rows
from tests.worker.kernels.kernel_parts import BF16, FLOAT32, Shape, noise

pytestmark = pytest.mark.long

SHAPES = (
    Shape(),
    Shape(head_dim=96, group=3, dtype=FLOAT32),
    Shape(head_dim=128, num_kv_heads=2, group=4),
    Shape(head_dim=80, group=16),
    Shape(head_dim=256, group=1, dtype=FLOAT32),
)
SMALL = Shape(group=3, dtype=FLOAT32)
LENGTHS = (0, 63, 64, 700)
SCALE = 0.1


def written(shape: Shape, lengths: Sequence[int], sizes: Sequence[int], seed: int) -> tuple[Arena, list[Placed]]:
    arena = random_arena(shape, lengths)
    sequences = random_rows(random.Random(seed), arena, sizes)
    for rows, slot in sequences:
        arena.buffer[:, :, slot, :, rows.first_entry : rows.first_entry + len(rows)] = noise(shape)[
            ..., -len(rows) :, :
        ]
    return arena, sequences


def queries(arena: Arena, num_rows: int, seed: int = 0) -> Tensor:
    shape = arena.shape
    generator = torch.Generator().manual_seed(seed)
    size = (num_rows, shape.num_kv_heads * shape.group, shape.head_dim)
    return torch.randn(size, generator=generator).to(shape.dtype)


def attended(
    arena: Arena,
    sequences: Sequence[Placed],
    query: Tensor,
    bias: Tensor | None = None,
    view: AttentionView = SEES_ALL,
    page: int | None = None,
) -> Tensor:
    """NaN in scratch and padding makes leaks show."""
    buffer, pages = (arena.buffer, None) if page is None else arena.in_pages(page)
    num_heads, head_dim = query.shape[1:]
    shape = AttentionShape(buffer.shape[3], num_heads // buffer.shape[3], head_dim, query.dtype)
    scratch = Scratch.empty(num_splits(CAPACITY, HEAD_BLOCKS), num_heads, head_dim, torch.device("cpu"), NUM_ROWS)
    scratch.output.fill_(NAN)
    scratch.lse.fill_(NAN)
    mixed = padded(query[:0])
    table = arena.table(sequences, pages)
    attend(shape, padded(query), KeptLayer(*buffer[1], bias, view, pages), table, scratch, mixed, SCALE)
    assert mixed[len(query) :].isnan().all()
    return mixed[: len(query)]


def exactly(
    arena: Arena,
    sequences: Sequence[Placed],
    query: Tensor,
    bias: Tensor | None = None,
    view: AttentionView = SEES_ALL,
) -> Tensor:
    outputs: list[Tensor] = []
    for rows, slot in sequences:
        for tail, length in zip(rows.tail_entries, rows.tail_lengths, strict=True):
            added = torch.zeros(rows.boundary + length, dtype=torch.float64)
            if bias is not None:
                added[: rows.boundary] = bias[slot, : rows.boundary]
            if view.window is not None:
                added[: max(0, len(added) - view.window)] = float("-inf")
            entries = torch.cat((torch.arange(rows.boundary), torch.from_numpy(tail[:length])))
            seen = entries[added > float("-inf")]
            keys, values = arena.buffer[1, :, slot][:, :, seen].double()
            heads = query[len(outputs)].double().unflatten(0, (len(keys), -1))
            scores = heads @ keys.mT * SCALE
            if view.softcap is not None:
                scores = view.softcap * (scores / view.softcap).tanh()
            scores = scores + added[added > float("-inf")]
            outputs.append((weights_of(scores, view) @ values).flatten(0, 1))
    return torch.stack(outputs)


def weights_of(scores: Tensor, view: AttentionView) -> Tensor:
    """Return `[num_kv_heads, heads of each, num_keys]`, with sinks."""
    if view.sinks is None:
        return scores.softmax(-1)
    sinks = view.sinks.double().view(*scores.shape[:2], 1)
    return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]


def num_rows_of(sequences: Sequence[Placed]) -> int:
    return sum(len(rows) for rows, _ in sequences)


def worst_error(
    arena: Arena, sequences: Sequence[Placed], bias: Tensor | None = None, view: AttentionView = SEES_ALL
) -> float:
    query = queries(arena, num_rows_of(sequences))
    found = attended(arena, sequences, query, bias, view=view).double()
    return float((found - exactly(arena, sequences, query, bias, view)).abs().max())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_trees_of_four_sequences_are_as_in_float64(shape: Shape) -> None:
    arena, sequences = written(shape, LENGTHS, (3, 1, 9, 12), seed=1)
    assert worst_error(arena, sequences) < (2e-6 if shape.dtype == FLOAT32 else 2e-2)


@pytest.mark.parametrize("num_rows", [1, 5, 6, 33, NUM_ROWS])
def test_any_number_of_rows_fits_into_groups(num_rows: int) -> None:
    arena, sequences = written(SMALL, [128, 300], (min(num_rows, 40), max(num_rows - 40, 0))[: 1 + num_rows // 41], 2)
    assert num_rows_of(sequences) == num_rows
    assert worst_error(arena, sequences) < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, FLOAT32], ids=str)
def test_every_number_of_rows_and_many_lengths(dtype: torch.dtype) -> None:
    numbers = random.Random(3)
    shape = Shape(num_kv_heads=2, group=4, dtype=dtype)
    for num_rows in range(1, NUM_ROWS + 1):
        lengths = [numbers.choice((0, 1, 63, 64, 65, 127, 128, 192, 255, 511, 777, 900)) for _ in range(4)]
        sizes = [num_rows // 4 + (slot < num_rows % 4) for slot in range(min(4, num_rows))]
        arena, sequences = written(shape, lengths, sizes, num_rows)
        assert worst_error(arena, sequences) < (2e-6 if dtype == FLOAT32 else 2e-2)


@pytest.mark.parametrize("shape", [SMALL, Shape()], ids=str)
def test_biases_are_added_and_entries_that_they_leave_out_are_never_seen(shape: Shape) -> None:
    arena, sequences = written(shape, (64, 300), (4, 6), seed=4)
    bias = torch.randn(2, CAPACITY, generator=torch.Generator().manual_seed(4))
    bias[1, 200:230] = float("-inf")
    arena.buffer[:, :, 1, :, 200:230] = NAN
    assert worst_error(arena, sequences, bias) < (2e-6 if shape.dtype == FLOAT32 else 2e-2)


def alone(arena: Arena, rows: Placed, row: int) -> tuple[Arena, list[Placed]]:
    """Run a row as in plain decoding, with its tail in the cache."""
    sequence, slot = rows
    tail = torch.from_numpy(sequence.tail_entries[row, : sequence.tail_lengths[row]])
    plain = arena.copy()
    root = sequence.boundary + len(tail) - 1
    plain.buffer[:, :, slot, :, sequence.boundary : root + 1] = arena.buffer[:, :, slot][..., tail, :]
    plain.buffer[:, :, slot, :, root + 1 :] = NAN
    plain.caches[slot].length = root
    return plain, [(tree_rows(plain.caches[slot], 0, DraftTree()), slot)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("shape", [SMALL, Shape(head_dim=80, group=4)], ids=str)
def test_a_row_has_the_bits_of_plain_decoding_in_any_company_and_order(shape: Shape) -> None:
    numbers = random.Random(5)
    arena, sequences = written(shape, (5, 100, 448, 700), (4, 14, 9, 7), seed=5)
    query = queries(arena, num_rows_of(sequences))
    together = attended(arena, sequences, query).split([len(rows) for rows, _ in sequences])
    parts = query.split([len(rows) for rows, _ in sequences])
    order = numbers.sample(range(4), 4)
    others = attended(arena, [sequences[each] for each in order], torch.cat([parts[each] for each in order]))
    for each, other in zip(order, others.split([len(parts[each]) for each in order]), strict=True):
        assert torch.equal(other, together[each])
    for each, rows in enumerate(sequences):
        for row in numbers.sample(range(len(rows[0])), min(3, len(rows[0]))):
            assert torch.equal(attended(*alone(arena, rows, row), parts[each][row : row + 1])[0], together[each][row])


@pytest.mark.sample(3)
@pytest.mark.parametrize(("page", "window"), [(256, 300), (64, None), (128, None)])
def test_entries_in_pages_in_any_order_have_the_bits_of_entries_side_by_side(page: int, window: int | None) -> None:
    """Splits count positions, so they begin and end inside pages."""
    for shape in (SMALL, Shape(head_dim=80, group=4)):
        arena, sequences = written(shape, (5, 100, 704, 448), (4, 14, 9, 7), seed=11)
        query, view = queries(arena, num_rows_of(sequences)), AttentionView(window)
        side_by_side = attended(arena, sequences, query, view=view)
        assert torch.equal(attended(arena, sequences, query, view=view, page=page), side_by_side)


@pytest.mark.parametrize("num_programs", [1, 7, 1000])
@pytest.mark.parametrize("window", [None, 600])
def test_any_number_of_programs_gives_the_same_bits(
    num_programs: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So they do not depend on a GPU's multiprocessors."""
    arena, sequences = written(Shape(num_kv_heads=2, group=4), (13 * BLOCK, 100, 9 * BLOCK), (2, 3, 30), seed=6)
    query, view = queries(arena, 35), AttentionView(window)
    expected = attended(arena, sequences, query, view=view)
    monkeypatch.setattr(tree_attention, "resident_programs", lambda *_: num_programs)
    assert torch.equal(attended(arena, sequences, query, view=view), expected)


def test_other_splits_give_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, sequences = written(SMALL, (13 * BLOCK,), (2,), seed=6)
    query = queries(arena, 2)
    plain = attended(arena, sequences, query)
    monkeypatch.setattr(tree_attention, "HEAD_BLOCKS", 7)
    other = attended(arena, sequences, query)
    assert not torch.equal(plain, other)
    torch.testing.assert_close(plain, other)


def test_more_query_heads_than_a_tile_has_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="found 17 query heads a KV head, expected at most 16"):
        AttentionShape(1, 17, 64, BF16)


def view_of(shape: Shape, window: int | None, softcap: float | None, has_sinks: bool) -> AttentionView:
    num_heads = shape.num_kv_heads * shape.group
    return AttentionView(window, softcap, torch.linspace(-2, 6, num_heads) if has_sinks else None)


VIEWS = [(1, None, False), (40, 3.0, False), (64, None, True), (65, None, False), (270, 3.0, True), (None, 3.0, True)]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("window", "softcap", "has_sinks"), VIEWS)
def test_windows_soft_caps_and_sinks_are_near_float64(
    window: int | None, softcap: float | None, has_sinks: bool
) -> None:
    for shape in (SMALL, Shape(head_dim=80, group=4)):
        arena, sequences = written(shape, (0, 63, 448, 700), (4, 1, 40, 7), seed=7)
        view = view_of(shape, window, softcap, has_sinks)
        error = worst_error(arena, sequences, view=view)
        assert error < (3e-6 if shape.dtype == FLOAT32 else 2e-2)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "window", [1, pytest.param(40, marks=pytest.mark.slow), 65, pytest.param(130, marks=pytest.mark.slow), 300]
)
def test_a_row_with_a_window_has_the_bits_of_plain_decoding(window: int) -> None:
    """Rows of a block see the prefix from different blocks on, some none of it."""
    for shape in (SMALL, Shape(head_dim=80, group=4)):
        view = view_of(shape, window, 5.0, has_sinks=True)
        arena, sequences = written(shape, (100, 448, 702), (14, 40, 7), seed=8)
        query = queries(arena, num_rows_of(sequences))
        together = attended(arena, sequences, query, view=view).split([len(rows) for rows, _ in sequences])
        parts = query.split([len(rows) for rows, _ in sequences])
        for each, rows in enumerate(sequences):
            for row in random.Random(each).sample(range(len(rows[0])), 3):
                plain, placed = alone(arena, rows, row)
                found = attended(plain, placed, parts[each][row : row + 1], view=view)
                assert torch.equal(found[0], together[each][row])


def test_blocks_that_no_row_of_a_block_sees_are_never_read() -> None:
    arena, sequences = written(SMALL, (704,), (20,), seed=9)
    view, query = AttentionView(100), queries(arena, 20)
    want = attended(arena, sequences, query, view=view)
    arena.buffer[..., : 704 - 128, :] = NAN
    assert torch.equal(attended(arena, sequences, query, view=view), want)


def test_flash_attn_beside_a_window_is_refused() -> None:
    attention = FlashAttention.__new__(FlashAttention)
    arena, sequences = written(SMALL, (64,), (1,), seed=10)
    kept = KeptLayer(*arena.buffer[1], view=AttentionView(100))
    with pytest.raises(ValueError, match="attend with triton"):
        attention.attend(0, kept, arena.table(sequences), queries(arena, 1))
