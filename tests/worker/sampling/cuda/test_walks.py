"""Walks along a GPU's drawn tokens."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.sampling.cuda.cuda_sampler import SampledRows, _walk
from swiftbatch.worker.sampling.cuda.sampling_rows import ROW, SamplingRow, SamplingRowLayout, leaving_tokens
from swiftbatch.worker.sampling.draft_tree import DraftTree, walk
from swiftbatch.worker.sampling.sequence import Sequence

VOCAB = 4  # few, so that walks are long

NO_LOGPROBS = SampledRows(*[np.empty((0, 0), np.int32)] * 4)


def random_tree(numbers: random.Random, num_tries: int) -> DraftTree:
    """Siblings have different tokens."""
    tree, known = DraftTree(), set[tuple[int, int]]()
    for _ in range(num_tries):
        parent, token_id = numbers.randrange(-1, len(tree)), numbers.randrange(VOCAB)
        if (parent, token_id) not in known:
            known.add((parent, token_id))
            tree.parents.append(parent)
            tree.token_ids.append(token_id)
    return tree


@pytest.mark.parametrize("seed", range(40))
def test_a_walk_along_drawn_tokens_is_that_of_the_reference(seed: int) -> None:
    """Also if a row has no token, which is -1."""
    numbers = random.Random(seed)
    tree = random_tree(numbers, numbers.randrange(30))
    drawn = [numbers.randrange(-(seed % 4 == 0), VOCAB) for _ in range(len(tree) + 1)]
    rows = torch.tensor(drawn)[:, None]
    expected = walk(tree, rows, lambda row: int(row[0]), lambda row: bool(row[0] >= 0))
    candidates = np.zeros((1, 8), dtype=np.int64), np.zeros((1, 8), dtype=np.float32)
    found = _walk(tree, [9, 9, *drawn, 9], 2, candidates, NO_LOGPROBS, None)
    assert found == expected._replace(candidates=candidates)


def test_walks_of_these_tests_go_down_some_nodes_and_fail_now_and_then() -> None:
    chain = DraftTree.chain([1, 2, 3])
    assert _walk(chain, [1, 2, 0, 3], 0, None, NO_LOGPROBS, None)[:3] == ([0, 1], [1, 2, 0], None)
    assert _walk(chain, [1, -1, 3, 3], 0, None, NO_LOGPROBS, None)[:3] == ([0], [1], 1)
    assert _walk(chain, [-1, 2, 3, 3], 0, None, NO_LOGPROBS, None)[:3] == ([], [], 0)


def test_sequences_with_the_same_parameters_have_rows_and_windows_of_their_own() -> None:
    params = SamplingParams(max_tokens=9, seed=7, repetition_penalty=1.5, penalty_window=2)
    first, second = (Sequence(name, ids, params, 50) for name, ids in (("a", [1, 2, 3]), ("b", [4, 5, 6, 7])))
    layout = SamplingRowLayout(3, 8)
    buffer = np.zeros(layout.size, dtype=np.int32)
    layout.fill(buffer, [SamplingRow(first, 1, []), SamplingRow(first, 1, [9]), SamplingRow(second, 2, [8, 9])], {})
    words, ancestors, leaving, _, _ = layout.parts(buffer)
    rows = words.reshape(-1).view(ROW)
    assert rows["slot"].tolist() == [1, 1, 2, *[-1] * 5]
    assert rows["position"][:3].tolist() == [3, 4, 6]
    assert rows["depth"][:3].tolist() == [0, 1, 2]
    assert rows["penalty"][:3].tolist() == [1.5] * 3
    assert [ancestors[1, 0], *ancestors[2, :2]] == [9, 8, 9]
    for slot, sequence in ((1, first), (2, second)):
        assert leaving[slot].tolist() == leaving_tokens(sequence.token_ids, 2).tolist()
