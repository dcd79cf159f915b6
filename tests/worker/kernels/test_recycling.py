"""Token recycling in C equals Python's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters import token_recycling
from swiftbatch.worker.drafters.token_recycling import (
    MOST_NODES,
    NativeRecycler,
    PythonRecycler,
    RecyclingTables,
    TextCandidates,
    create_recycler,
)
from swiftbatch.worker.sampling.draft_tree import ROOT, TOP_K, DraftTree
from swiftbatch.worker.sampling.sequence import Sequence
from tests.worker.kernels.kernel_parts import VARIANTS, needs_kernels

pytestmark = needs_kernels

VOCAB, LARGE_VOCAB = 300, 128_256
NUM_TOKENS = 40  # the last of a vocabulary, used in the tables' texts
SAMPLED = SamplingParams(max_tokens=9, seed=2**40 + 3)
PARAMS = {
    "plain": SAMPLED,
    "greedy": SAMPLED.model_copy(update={"temperature": 0.0, "min_p": 0.5}),
    "one candidate": SAMPLED.model_copy(update={"top_k": 1}),
    "min-p": SAMPLED.model_copy(update={"min_p": 0.1}),
    "none but the best": SAMPLED.model_copy(update={"min_p": 1.0}),
    "tiny T": SAMPLED.model_copy(update={"temperature": 1e-30, "min_p": 0.1}),
    "huge T": SAMPLED.model_copy(update={"temperature": 100.0, "min_p": 0.1}),
}
Recycler = PythonRecycler | NativeRecycler
Write = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def random_write(numbers: np.random.Generator, num_rows: int, vocab_size: int = VOCAB) -> Write:
    """Many candidates repeat, and some rows have pairs."""
    token_ids = vocab_size - 1 - numbers.integers(0, NUM_TOKENS, num_rows)
    ids = vocab_size - 1 - np.argsort(numbers.random((num_rows, NUM_TOKENS + 9)), axis=1)[:, :TOP_K]
    logits = -np.sort(-3 * numbers.standard_normal((num_rows, TOP_K + 4)).astype(np.float32), axis=1)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    text_rows = np.flatnonzero(numbers.random(num_rows) < 0.5)
    previous_ids = vocab_size - 1 - numbers.integers(0, NUM_TOKENS // 4, len(text_rows))
    return token_ids, ids, logprobs[:, :TOP_K].copy(), text_rows, previous_ids


def arrays_of(tables: RecyclingTables) -> list[np.ndarray]:
    pairs = tables.pairs
    return [tables.tokens.ids, tables.tokens.logprobs, pairs.keys, pairs.matrix.ids, pairs.matrix.logprobs]


def with_writes(make: Callable[[RecyclingTables], Recycler], num_writes: int, vocab_size: int = VOCAB) -> Recycler:
    numbers, made = np.random.default_rng(1), make(RecyclingTables(vocab_size))
    for _ in range(num_writes):
        made.write([TextCandidates(*random_write(numbers, int(numbers.integers(0, 33)), vocab_size))])
    return made


def python(tables: RecyclingTables, with_noise: bool = True) -> Recycler:
    return PythonRecycler(tables, with_noise)


def native(variant: str, with_noise: bool = True) -> Callable[[RecyclingTables], Recycler]:
    return lambda tables: NativeRecycler(tables, with_noise, variant)


def tree_of(recycler: Recycler, text: Sequence, max_nodes: int, max_depth: int) -> DraftTree:
    return recycler.trees([(text, max_nodes, max_depth)])[0]


def sequence(params: SamplingParams, *token_ids: int, vocab_size: int = VOCAB) -> Sequence:
    return Sequence("a", list(token_ids), params, vocab_size)


def sequences(params: SamplingParams) -> Iterator[Sequence]:
    """Most text ends are in the tables; nothing of the last is."""
    numbers = np.random.default_rng(2)
    for _ in range(12):
        yield sequence(params, *numbers.integers(VOCAB - NUM_TOKENS, VOCAB, int(numbers.integers(1, 20))).tolist())
    yield sequence(params, VOCAB - 1)
    yield sequence(params, 0, 1)


@pytest.fixture(scope="module")
def learned() -> Recycler:
    return with_writes(python, 30)


@pytest.mark.sample(3)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", PARAMS)
def test_trees_are_those_of_the_reference(variant: str, name: str, learned: Recycler) -> None:
    found = with_writes(native(variant), 30)
    sizes = set()
    for text in sequences(PARAMS[name]):
        for max_nodes, max_depth in ((16, 20), (MOST_NODES, 6), (1, 1), (40, 2), (0, 5), (5, 0), (-1, -1)):
            tree = tree_of(found, text, max_nodes, max_depth)
            assert tree == tree_of(learned, text, max_nodes, max_depth)
            sizes.add(len(tree))
    assert {0, 1} <= sizes
    assert max(sizes) >= 4  # without noise all trees are chains


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_tree_without_noise_is_that_of_the_reference(variant: str) -> None:
    expected = with_writes(lambda tables: python(tables, with_noise=False), 30)
    found = with_writes(native(variant, with_noise=False), 30)
    for text in sequences(PARAMS["min-p"]):
        assert tree_of(found, text, 16, 20) == tree_of(expected, text, 16, 20)


@pytest.mark.parametrize("vocab_size", [VOCAB, LARGE_VOCAB])
def test_rows_are_those_of_the_reference_and_the_same_bits_in_every_variant(vocab_size: int) -> None:
    tables = [RecyclingTables(vocab_size) for _ in (None, *VARIANTS)]
    makers = [python, *(native(variant) for variant in VARIANTS)]
    for own, make in zip(tables, makers, strict=True):
        with_writes(lambda _, own=own, make=make: make(own), 60, vocab_size)  # type: ignore[misc]
    expected, found = arrays_of(tables[0]), arrays_of(tables[1])
    for other in tables[2:]:
        assert all(np.array_equal(a, b) for a, b in zip(arrays_of(other), found, strict=True))
    np.testing.assert_array_equal(found[2], expected[2])
    for ids, logprobs in ((0, 1), (3, 4)):
        assert np.array_equal(found[logprobs] == -np.inf, expected[logprobs] == -np.inf)
        known = expected[logprobs] > -np.inf
        assert 400 < known.sum() < known.size
        np.testing.assert_allclose(found[logprobs][known], expected[logprobs][known], atol=1e-6, rtol=1e-6)
        assert np.array_equal(found[ids][known], expected[ids][known])


def test_the_ends_of_a_large_vocabulary_are_drafted_from() -> None:
    last = LARGE_VOCAB - 1
    ids = np.array([[last, 0, 1, 2, 3, 4, 5, 6], [0, last, 1, 2, 3, 4, 5, 6]])
    logprobs = np.log(np.array([0.6, 0.2, *[0.02] * 6], dtype=np.float32))[None].repeat(2, axis=0)
    trees = []
    for make in (python, *(native(variant) for variant in VARIANTS)):
        made = make(RecyclingTables(LARGE_VOCAB))
        made.write([TextCandidates(np.array([last, 0]), ids, logprobs, np.array([0]), np.array([last]))])
        trees.append(tree_of(made, sequence(SAMPLED, last, last, vocab_size=LARGE_VOCAB), 12, 3))
    assert trees == trees[:1] * len(trees)
    assert {0, last} <= set(trees[0].token_ids)


@pytest.mark.parametrize("variant", VARIANTS)
def test_pairs_that_share_a_row_take_it_over(variant: str) -> None:
    """If pairs of one call share a row, the last one gets it."""
    recyclers = [(tables := RecyclingTables(LARGE_VOCAB), make(tables)) for make in (python, native(variant))]
    pairs = recyclers[0][0].pairs
    keys = [key for key in range(200_000) if pairs._index(key) == pairs._index(5)][:4]
    previous, tokens = np.divmod(np.array(keys), LARGE_VOCAB)
    _, ids, logprobs, _, _ = random_write(np.random.default_rng(3), 4)
    for order in ([0, 1, 2, 3], [3, 0], [1, 1], [2]):
        rows = np.arange(len(order))
        for _, each in recyclers:
            each.write([TextCandidates(tokens[order], ids[order], logprobs[order], rows, previous[order])])
        expected, found = (arrays_of(tables)[2:] for tables, _ in recyclers)
        assert np.array_equal(found[0], expected[0])
        for pair in zip(previous, tokens, strict=True):
            text = sequence(PARAMS["greedy"], *pair, vocab_size=LARGE_VOCAB)
            assert tree_of(recyclers[1][1], text, 9, 1) == tree_of(recyclers[0][1], text, 9, 1)
        row = pairs._index(5)
        assert found[0][row] == keys[order[-1]]
        np.testing.assert_allclose(found[2][row], expected[2][row], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_candidates_that_are_as_likely_come_in_the_order_of_the_reference(variant: str) -> None:
    token_ids = np.arange(2 * TOP_K)
    ids, logprobs = np.tile(token_ids[3 : 3 + TOP_K], (len(token_ids), 1)), np.full((len(token_ids), TOP_K), -3.0)
    trees = []
    for make in (python, native(variant)):
        made = make(RecyclingTables(VOCAB))
        made.write([TextCandidates(token_ids, ids, logprobs, token_ids[:0], token_ids[:0])])
        trees.append(tree_of(made, sequence(PARAMS["greedy"], 1, 2), 50, 3))
    assert trees[0] == trees[1]
    assert max(trees[0].depths()) == 2


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_of_nothing_stay_unknown(variant: str) -> None:
    """The target's NaN rows are candidates of the lowest likelihood."""
    tables = RecyclingTables(VOCAB)
    found = NativeRecycler(tables, True, variant)
    text = sequence(SAMPLED, 3, 4)
    assert tree_of(found, text, 8, 8) == DraftTree()
    tokens, rows = np.array([4]), np.array([0])
    for unlikely in (-1e4, -np.inf):
        found.write(
            [TextCandidates(tokens, np.arange(TOP_K)[None], np.full((1, TOP_K), unlikely), rows, np.array([3]))]
        )
        assert tree_of(found, text, 8, 8) == DraftTree()
    found.write([TextCandidates(tokens, np.arange(TOP_K)[None], np.log(np.full((1, TOP_K), 0.1)), rows, np.array([3]))])
    assert sorted(tree_of(found, text, 8, 1).token_ids) == list(range(TOP_K))
    assert tables.tokens.row(4)[0] == list(range(TOP_K))


@pytest.mark.parametrize("variant", VARIANTS)
def test_texts_of_a_step_are_taken_in_and_drafted_for_as_if_each_came_alone(variant: str) -> None:
    numbers = np.random.default_rng(8)
    steps = [[TextCandidates(*random_write(numbers, size)) for size in (5, 0, 1, 32)] for _ in range(9)]
    together, alone = (RecyclingTables(VOCAB) for _ in range(2))
    recyclers = [NativeRecycler(tables, True, variant) for tables in (together, alone)]
    for step in steps:
        recyclers[0].write(step)
        for text in step:
            recyclers[1].write([text])
    assert all(np.array_equal(a, b) for a, b in zip(arrays_of(together), arrays_of(alone), strict=True))
    wanted = [(text, 7 * number % 40, 1 + number) for number, text in enumerate(sequences(SAMPLED))]
    assert recyclers[0].trees(wanted) == [tree_of(recyclers[1], *each) for each in wanted]


@pytest.mark.parametrize("variant", VARIANTS)
def test_damaged_numbers_make_poor_trees_and_nothing_worse(variant: str) -> None:
    numbers, tables = np.random.default_rng(5), RecyclingTables(VOCAB)
    found = NativeRecycler(tables, True, variant)
    for _ in range(30):
        for matrix in (tables.tokens, tables.pairs.matrix):
            matrix.ids[:] = numbers.integers(0, VOCAB, matrix.ids.shape)
            matrix.logprobs[:] = numbers.choice([-1.0, 0.0, 1e30, np.nan, np.inf, -np.inf, -1e30], matrix.ids.shape)
        tables.pairs.keys[:] = numbers.integers(-(2**62), 2**62, len(tables.pairs.keys))
        found.write([TextCandidates(*random_write(numbers, 32))])
        tree = tree_of(found, sequence(SAMPLED, *numbers.integers(0, VOCAB, 9).tolist()), 60, 9)
        assert all(0 <= token_id < VOCAB for token_id in tree.token_ids)
        assert all(ROOT <= parent < node for node, parent in enumerate(tree.parents))


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    tables = RecyclingTables(VOCAB)
    found = NativeRecycler(tables, True, VARIANTS[0])
    found.write([TextCandidates(*random_write(np.random.default_rng(6), 20))])
    before = [array.copy() for array in arrays_of(tables)]
    good = (*random_write(np.random.default_rng(7), 4)[:3], np.array([1, 3]), np.array([8, 9]))
    for place, bad in (
        *((0, bad) for bad in (np.zeros((2, 2)), np.array([0, 1, 2, VOCAB]), np.array([0, -1, 2, 3]))),
        *((1, bad) for bad in (good[1][:3], good[1][:, :5], good[1] - VOCAB, good[1] + VOCAB)),
        *((2, bad) for bad in (good[2][:3], good[2][:, :5], good[2].ravel())),
        *((3, bad) for bad in (np.array([1, 4]), np.array([-1, 0]), np.array([1]), np.array([[1], [3]]))),
        *((4, bad) for bad in (np.array([8]), np.array([8, VOCAB]), np.array([-8, 1]))),
    ):
        with pytest.raises(ValueError, match=r"expected|outside"):
            found.write([TextCandidates(*good[:place], bad, *good[place + 1 :])])
    with pytest.raises(ValueError, match=r"ends with 3, 300; expected tokens below 300"):
        tree_of(found, sequence(SAMPLED, 3, VOCAB), 8, 8)
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(arrays_of(tables), before, strict=True))


def test_kernels_are_used_where_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = RecyclingTables(VOCAB)
    assert isinstance(create_recycler(tables, with_noise=True), NativeRecycler)
    monkeypatch.setattr(token_recycling, "chosen_variant", lambda: None)
    assert isinstance(create_recycler(tables, with_noise=True), PythonRecycler)
