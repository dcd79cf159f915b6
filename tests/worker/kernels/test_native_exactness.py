"""A row's bits do not depend on neighbours, ancestors' places or threads."""

from __future__ import annotations

import copy
import os
import random
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftbatch.worker.forward.tile_packing import tree_rows
from swiftbatch.worker.kv.cache_rows import bits_of
from swiftbatch.worker.sampling.draft_tree import ROOT
from tests.worker.kernels.kernel_parts import (
    BF16,
    COMPRESSED,
    F32_VARIANTS,
    FLOAT32,
    INDEXED,
    LATENTS,
    SHAPES,
    VARIANTS,
    Shape,
    chain,
    decoded_alone,
    native,
    needs_kernels,
    path_to,
    random_cache,
    random_tree,
    whole,
)

pytestmark = needs_kernels

EDGES = [edge + off for edge in (0, 64, 128, 192, 256, 512, 2048, 4096) for off in (-1, 0, 1) if edge + off >= 0]
seeds = st.integers(0, 2**32)


@pytest.mark.long
@given(
    st.sampled_from((*SHAPES, *LATENTS, *INDEXED, *COMPRESSED)),
    st.sampled_from(VARIANTS or ["none"]),
    st.sampled_from((1, 2)),
    st.lists(st.tuples(st.sampled_from(EDGES), st.integers(0, 63)), min_size=1, max_size=4),
    seeds,
)
@settings(max_examples=25)
def test_a_row_among_others_has_the_bits_of_plain_decoding(
    shape: Shape, variant: str, num_threads: int, sequences: list[tuple[int, int]], seed: int
) -> None:
    numbers = random.Random(seed)
    if variant == "portable":  # exact and slow
        sequences = [(length % 640, num_nodes) for length, num_nodes in sequences]
    caches = [random_cache(shape, length) for length, _ in sequences]
    alone = copy.deepcopy(caches)
    roots = [numbers.randrange(shape.vocab) for _ in sequences]
    trees = [random_tree(numbers, num_nodes, length, shape.vocab) for length, num_nodes in sequences]
    groups = [tree_rows(*each) for each in zip(caches, roots, trees, strict=True)]
    hidden, logits = whole(native(shape, variant, num_threads).forward(groups))
    first_row = 0
    for cache, own, root, tree in zip(caches, alone, roots, trees, strict=True):
        node = numbers.randrange(ROOT, len(tree))
        path = path_to(tree, node)
        tokens = [root, *(tree.token_ids[each] for each in path)]
        own_hidden, own_logits = decoded_alone(native(shape, variant), own, tokens)
        assert torch.isfinite(own_logits).all()
        assert torch.equal(hidden[first_row + node + 1], own_hidden)
        assert torch.equal(logits[first_row + node + 1], own_logits)
        cache.commit(path)
        assert np.array_equal(cache.kv(0, own.length), own.kv(0, own.length))
        first_row += len(tree) + 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_prompt_of_many_blocks_in_one_forward_has_the_bits_of_plain_decoding(variant: str) -> None:
    shape = SHAPES[0]
    tokens = [7 * each % shape.vocab for each in range(200)]
    together, alone = random_cache(shape, 64, room=200), random_cache(shape, 64, room=200)
    blocks, cache = [], copy.copy(together)
    for start in range(0, 200, 64):
        blocks.append(chain(copy.copy(cache), tokens[start : start + 64]))
        cache.advance(64)
    hidden, logits = whole(native(shape, variant, 2).forward(blocks))
    own_hidden, own_logits = decoded_alone(native(shape, variant), alone, tokens)
    assert torch.equal(hidden[-1], own_hidden)
    assert torch.equal(logits[-1], own_logits)
    assert np.array_equal(together.kv(0, 264), alone.kv(0, 264))


@pytest.mark.sample(2)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", [*INDEXED, *COMPRESSED], ids=str)
def test_rows_that_see_chosen_keys_have_the_bits_of_plain_decoding(shape: Shape, variant: str) -> None:
    """Some of a call's rows see all of their keys, and one choice has several spans and no multiple of 64 keys."""
    for length in (90, 260, 2200):
        cache, alone = (random_cache(shape, length) for _ in range(2))
        tokens, beside = [5, 6, 7, 8, 9], chain(random_cache(shape, 20), [3, 4])
        hidden, logits = whole(native(shape, variant, 2).forward([beside, chain(cache, tokens)]))
        own_hidden, own_logits = decoded_alone(native(shape, variant), alone, tokens)
        assert torch.equal(hidden[-1], own_hidden)
        assert torch.equal(logits[-1], own_logits)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [BF16, FLOAT32], ids=["bf16", "float32"])
def test_all_instruction_sets_without_products_of_bf16_give_the_same_bits(dtype: torch.dtype) -> None:
    for shape in (each for each in (*SHAPES, *LATENTS, *INDEXED, *COMPRESSED) if each.dtype == dtype):
        outputs = []
        lengths = (0, 300) if shape.group > 2 else (0, 300, 2090)
        for variant in VARIANTS if dtype == FLOAT32 else F32_VARIANTS:
            groups = [chain(random_cache(shape, length), list(range(1, 8))) for length in lengths]
            outputs.append(
                (
                    *whole(native(shape, variant).forward(groups)),
                    *(bits_of(group.cache.rows.buffer) for group in groups),
                )
            )
        for other in outputs[1:]:
            for mine, its in zip(outputs[0], other, strict=True):
                assert torch.equal(mine.nan_to_num(), its.nan_to_num())


@pytest.fixture
def one_core() -> Iterator[None]:
    """Helpers share the caller's core, so that they are always late."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)


@pytest.mark.parametrize("variant", VARIANTS[:1])
@pytest.mark.usefixtures("one_core")
def test_helpers_that_come_late_change_nothing(variant: str) -> None:
    shape = SHAPES[3]
    native.cache_clear()
    cache = random_cache(shape, 4160)
    tokens = list(range(1, 9))
    want = whole(native(shape, variant).forward([chain(cache, tokens)]))
    for _ in range(20):
        found = whole(native(shape, variant, 4).forward([chain(cache, tokens)]))
        assert all(torch.equal(*each) for each in zip(want, found, strict=True))


@pytest.mark.parametrize("variant", VARIANTS[:1])
def test_a_child_of_a_fork_starts_threads_of_its_own(variant: str) -> None:
    shape = SHAPES[3]  # wide enough for help
    rows = [chain(random_cache(shape, 4160), [1, 2, 3])]
    _, want = whole(native(shape, variant, 2).forward(rows))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads, since Python 3.12
        child = os.fork()
    if child == 0:
        _, found = whole(native(shape, variant, 2).forward(rows))
        os._exit(0 if (found == want).all() else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("variant", VARIANTS[:2])
def test_matrices_that_helpers_share_have_the_bits_of_plain_decoding(variant: str) -> None:
    shape = Shape(hidden=512, intermediate=1504, vocab=1000, group=8)
    tokens = list(range(1, 40))
    hidden, logits = whole(native(shape, variant, 3).forward([chain(random_cache(shape, 0), tokens)]))
    own_hidden, own_logits = decoded_alone(native(shape, variant), random_cache(shape, 0), tokens)
    assert torch.equal(hidden[-1], own_hidden)
    assert torch.equal(logits[-1], own_logits)


@pytest.mark.parametrize("variant", VARIANTS[:1])
def test_layers_one_by_one_and_the_head_alone_have_the_bits_of_one_call(variant: str) -> None:
    shape = SHAPES[4]
    decoder = native(shape, variant)
    want = whole(decoder.forward([chain(random_cache(shape, 130), [1, 2, 3])]))
    rows, state = [chain(random_cache(shape, 130), [1, 2, 3])], torch.empty(3, shape.hidden)
    assert decoder.forward(rows, layers=range(1), state=state) == (None, None)
    hidden, logits = decoder.forward(rows, with_logits=False, layers=range(1, 2), state=state)
    assert logits is None
    assert hidden is not None
    assert torch.equal(hidden, want[0])
    assert torch.equal(decoder.logits(hidden), want[1])
