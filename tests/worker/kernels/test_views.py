"""With windows, soft caps and sinks a row depends on its own position and keys alone."""

from __future__ import annotations

import copy
import functools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swiftbatch.worker.forward.tile_packing import SequenceRows, tree_rows
from swiftbatch.worker.kernels.layer_specs import AttentionView
from swiftbatch.worker.kernels.native_decoder import native_attention
from swiftbatch.worker.kernels.native_library import Team, load_library
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.sampling.draft_tree import ROOT, DraftTree
from tests.worker.kernels.kernel_parts import (
    BF16,
    F32_VARIANTS,
    FLOAT32,
    VARIANTS,
    Shape,
    chain,
    native,
    needs_kernels,
    path_to,
    random_cache,
    random_tree,
)
from tests.worker.kernels.reference import reference_attention

pytestmark = [pytest.mark.long, needs_kernels]

SHAPES = (Shape(num_kv_heads=2, group=3), Shape(head_dim=256, group=2, dtype=FLOAT32))
EDGES = [edge + off for edge in (64, 128, 256, 512, 2048, 2304) for off in (-1, 0, 1)]
SCALE = 0.2
seeds = st.integers(0, 2**32)

Inputs = tuple[Tensor, Tensor, Tensor]


@functools.cache
def team(variant: str, num_threads: int) -> Team:
    return Team(load_library(variant), num_threads)


def random_inputs(shape: Shape, num_rows: int, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    heads = (shape.num_kv_heads * shape.group, shape.num_kv_heads, shape.num_kv_heads)
    query, key, value = (
        torch.randn(num_rows, each, shape.head_dim, generator=generator).to(shape.dtype) for each in heads
    )
    return query, key, value


def view_of(shape: Shape, window: int | None, softcap: float | None = None, has_sinks: bool = False) -> AttentionView:
    num_heads = shape.num_kv_heads * shape.group
    return AttentionView(window, softcap, torch.linspace(-4, 8, num_heads) if has_sinks else None)


def attend(
    groups: list[SequenceRows], inputs: Inputs, view: AttentionView, variant: str, num_threads: int = 1
) -> Tensor:
    return native_attention(team(variant, num_threads), groups, 0, *inputs, SCALE, view)


def alone(cache: FullKVCache, path: list[int], inputs: Inputs, view: AttentionView, variant: str) -> Tensor:
    for row in path:
        query, key, value = (each[row : row + 1] for each in inputs)
        output = attend([tree_rows(cache, 0, DraftTree())], (query, key, value), view, variant)
        cache.advance(1)
    return output[0]


@given(
    st.sampled_from(SHAPES),
    st.sampled_from(VARIANTS or ["none"]),
    st.sampled_from((1, 2)),
    st.sampled_from([1, 2, 40, *EDGES]),
    st.sampled_from((None, 5.0)),
    st.booleans(),
    st.lists(st.tuples(st.sampled_from([0, *EDGES, 4100]), st.integers(0, 63)), min_size=1, max_size=3),
    seeds,
)
@settings(max_examples=30)
def test_a_row_among_others_has_the_bits_that_it_has_alone(
    shape: Shape,
    variant: str,
    num_threads: int,
    window: int,
    softcap: float | None,
    has_sinks: bool,
    sequences: list[tuple[int, int]],
    seed: int,
) -> None:
    numbers, view = random.Random(seed), view_of(shape, window, softcap, has_sinks)
    caches = [random_cache(shape, length) for length, _ in sequences]
    copies = copy.deepcopy(caches)
    trees = [random_tree(numbers, num_nodes, length, shape.vocab) for length, num_nodes in sequences]
    inputs = random_inputs(shape, sum(len(tree) + 1 for tree in trees), seed)
    groups = [tree_rows(cache, 0, tree) for cache, tree in zip(caches, trees, strict=True)]
    together = attend(groups, inputs, view, variant, num_threads)
    assert together.isfinite().all()
    first = 0
    for own, tree in zip(copies, trees, strict=True):
        node = numbers.randrange(ROOT, len(tree))
        path = [first, *(first + 1 + each for each in path_to(tree, node))]
        assert torch.equal(together[first + 1 + node], alone(own, path, inputs, view, variant))
        first += len(tree) + 1


@pytest.mark.sample(3)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("window", [1, 63, 65, 200, 257, 2049])
def test_every_row_of_a_block_sees_its_own_window_whatever_the_others_see(variant: str, window: int) -> None:
    """The first of 64 rows see chunks before the others' windows."""
    for shape in SHAPES:
        cache, inputs = random_cache(shape, 2304), random_inputs(shape, 64)
        own, view = copy.deepcopy(cache), view_of(shape, window)
        together = attend([chain(cache, [0] * 64)], inputs, view, variant)
        for row in range(64):
            assert torch.equal(together[row], alone(own, [row], inputs, view, variant))


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [BF16, FLOAT32], ids=["bf16", "float32"])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 64, 100, 300])
def test_attention_is_as_near_to_float64_as_its_dtype_allows(
    window: int | None, has_sinks: bool, softcap: float | None, dtype: torch.dtype
) -> None:
    shape = Shape(num_kv_heads=2, group=3, dtype=dtype)
    view, lengths = view_of(shape, window, softcap, has_sinks), (3, 100, 300, 2090)
    for variant in VARIANTS:
        groups = [chain(random_cache(shape, length), [0] * 6) for length in lengths]
        inputs = random_inputs(shape, 24)
        exact = reference_attention(groups, 0, *inputs, SCALE, view, torch.float64)
        error = (attend(groups, inputs, view, variant).double() - exact.double()).abs().max()
        assert error <= (3e-6 if dtype == FLOAT32 else 0.02) * exact.abs().max()


@pytest.mark.parametrize("dtype", [BF16, FLOAT32], ids=["bf16", "float32"])
def test_all_instruction_sets_without_products_of_bf16_give_the_same_bits(dtype: torch.dtype) -> None:
    shape = Shape(num_kv_heads=2, group=3, dtype=dtype)
    view = view_of(shape, 300, 3.0, has_sinks=True)
    outputs = [
        attend([chain(random_cache(shape, 600), [0] * 30)], random_inputs(shape, 30), view, variant)
        for variant in (VARIANTS if dtype == FLOAT32 else F32_VARIANTS)
    ]
    assert all(torch.equal(outputs[0], other) for other in outputs)


@pytest.mark.parametrize("variant", VARIANTS)
def test_blocks_that_no_row_sees_are_never_read(variant: str) -> None:
    """So a cache may forget them."""
    for shape in SHAPES:
        cache, inputs, view = random_cache(shape, 2304), random_inputs(shape, 30), view_of(shape, 100)
        want = attend([chain(cache, [0] * 30)], inputs, view, variant)
        cache.rows.buffer[..., : 2304 - 128, :] = float("nan")
        assert torch.equal(attend([chain(cache, [0] * 30)], inputs, view, variant), want)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_window_as_long_as_the_text_changes_no_bit(variant: str) -> None:
    for shape in SHAPES:
        inputs = random_inputs(shape, 30)
        whole, windowed = (
            attend([chain(random_cache(shape, 600), [0] * 30)], inputs, view_of(shape, window), variant)
            for window in (None, 630)
        )
        assert torch.equal(whole, windowed)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_decoder_asked_for_some_of_its_layers_knows_their_windows(variant: str) -> None:
    shape = Shape(windows=(40, None))
    decoder, tokens = native(shape, variant), list(range(1, 20))
    whole, _ = decoder.forward([chain(random_cache(shape, 300), tokens)])
    cache, state = random_cache(shape, 300), torch.empty(19, shape.hidden)
    decoder.forward([chain(cache, tokens)], layers=range(1), state=state)
    hidden, _ = decoder.forward([chain(cache, tokens)], layers=range(1, 2), state=state)
    assert hidden is not None
    assert whole is not None
    assert torch.equal(hidden, whole)


def test_what_is_no_window_no_soft_cap_and_no_sink_of_each_head_is_refused() -> None:
    for nothing in ({"window": 0}, {"softcap": 0.0}):
        with pytest.raises(ValueError, match="expected more than 0"):
            AttentionView(**nothing)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="found sinks"):
        attend(
            [chain(random_cache(SHAPES[0], 10), [0])],
            random_inputs(SHAPES[0], 1),
            AttentionView(sinks=torch.zeros(5)),
            VARIANTS[0],
        )
