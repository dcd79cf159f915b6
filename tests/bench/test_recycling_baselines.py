from __future__ import annotations

import numpy as np
import pytest

from bench.recycling_baselines import NGRAM_SIZE, DatastoreDrafter, LookaheadDrafter, tree_of
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.sampling.draft_tree import ROOT, DraftTree, Verification
from swiftbatch.worker.sampling.sequence import Sequence

CYCLE = 7
VOCAB = 100


def text(*token_ids: int) -> Sequence:
    return Sequence("text", list(token_ids), SamplingParams(max_tokens=50), VOCAB)


def paths_of(tree: DraftTree) -> set[tuple[int, ...]]:
    paths: dict[int, tuple[int, ...]] = {ROOT: ()}
    for node, (token_id, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
        paths[node] = (*paths[parent], token_id)
    return set(paths.values()) - {()}


def test_paths_share_their_beginnings_within_the_limits() -> None:
    tree = tree_of([(1, 2, 3), (1, 2, 4), (5,)], max_nodes=10, max_depth=3)
    assert (tree.token_ids, tree.parents) == ([1, 2, 3, 4, 5], [ROOT, 0, 1, 1, ROOT])
    assert len(tree_of([(1, 2, 3), (1, 2, 4)], max_nodes=2, max_depth=3)) == 2
    assert max(tree_of([(1, 2, 3)], max_nodes=9, max_depth=2).depths()) == 2


def test_matches_of_the_longest_end_come_first_by_frequency() -> None:
    store = [1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3, 4, 8, 7, 3, 6]
    drafter = DatastoreDrafter(store)
    tree = drafter.tree(text(50, 1, 2, 3), 60, 3)
    assert tree.token_ids[0] == 4  # twice; 6 follows the shorter match alone
    assert paths_of(tree) == {(4,), (4, 9), (4, 9, 1), (4, 8), (4, 8, 7), (5,), (5, 9), (5, 9, 1)}
    assert drafter.tree(text(50, 60), 60, 3) == DraftTree()
    assert drafter.tree(text(50, 3), 60, 1).token_ids[0] == 4
    assert drafter.tree(text(1, 6), 60, 3) == DraftTree()  # nothing follows the last token of the store


def steps(drafter: LookaheadDrafter, sequence: Sequence, num_steps: int) -> list[int]:
    """Verify drafts with a model that counts up to `CYCLE`; return how many tokens each step accepts."""
    found = []
    for _ in range(num_steps):
        tree = drafter.tree(sequence, 100, 20)
        rows = [sequence.last_token_id, *tree.token_ids]
        path, children, token = list[int](), tree.children(), (rows[0] + 1) % CYCLE
        while (node := children.get(path[-1] if path else ROOT, {}).get(token)) is not None:
            path.append(node)
            token = (token + 1) % CYCLE
        committed = [*(tree.token_ids[node] for node in path), token]
        sequence.extend(committed)
        top_ids = np.array([[(row + 1) % CYCLE] for row in rows])
        drafter.update(sequence, Verification(tree, path, committed, rows, top_ids, np.zeros((len(rows), 1))))
        found.append(len(path))
    return found


def test_ngrams_of_improving_guesses_are_accepted() -> None:
    drafter, sequence = LookaheadDrafter(), text(3)
    accepted = steps(drafter, sequence, 12)
    assert accepted[:NGRAM_SIZE] == [0] * NGRAM_SIZE  # a guess gets right one token later at each step
    assert max(accepted) >= NGRAM_SIZE - 1
    assert sequence.output_ids.tolist() == [(4 + place) % CYCLE for place in range(len(sequence.output_ids))]


def test_ngrams_serve_the_next_text() -> None:
    drafter = LookaheadDrafter()
    first = text(3)
    steps(drafter, first, 12)
    drafter.stop(first)
    assert (4, 5, 6, 0) in paths_of(drafter.tree(text(3), 100, 20))


@pytest.mark.parametrize("max_nodes", [0, 1, 7])
def test_trees_stay_within_the_limits(max_nodes: int) -> None:
    drafter, sequence = LookaheadDrafter(), text(3)
    steps(drafter, sequence, 12)
    assert len(drafter.tree(sequence, max_nodes, 20)) == max_nodes
