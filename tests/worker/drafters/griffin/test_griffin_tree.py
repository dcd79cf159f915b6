"""Dynamic trees have the best paths with the coming noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.griffin.draft_input import TorchRoom
from swiftbatch.worker.drafters.griffin.griffin import EVERYTHING_PAYS, GrowingTree, PricePlanner, TreePrices
from swiftbatch.worker.forward.step_costs import ROW_COUNTS, StepCosts
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sampler import TokenSampler
from swiftbatch.worker.sampling.sequence import Sequence

VOCAB = 8
PARAMS = SamplingParams(max_tokens=100, temperature=1.0, seed=3)
NO_CACHE = FullKVCache(CacheShape(1, 1, 1, torch.float32, torch.device("cpu")), 0)
GREEDY = SamplingParams(max_tokens=100, temperature=0.0)


def table(token_id: int) -> torch.Tensor:
    """Return logits `[vocab]` after a token."""
    return torch.tensor([3.0 * math.sin(2.0 * token_id + 1.3 * other) for other in range(VOCAB)])


def room_of(sequence: Sequence) -> TorchRoom:
    return TorchRoom.of(sequence, NO_CACHE, torch.zeros(1))


def paths_of(tree: DraftTree) -> list[list[int]]:
    paths: list[list[int]] = []
    for token_id, parent in zip(tree.token_ids, tree.parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token_id])
    return paths


def grow(
    params: SamplingParams, max_depth: int = 4, width: int = 3, prices: TreePrices = EVERYTHING_PAYS
) -> GrowingTree:
    sequence = Sequence("a", [1], params, VOCAB)
    tree, room = GrowingTree(sequence, max_depth, width, prices), room_of(sequence)
    tree.add_root(room.rank(table(1)[None], [[]], width)[0])
    while (level := tree.next_level()) is not None:
        tokens, paths = level.tree.token_ids[level.first :], paths_of(level.tree)[level.first :]
        tree.add_level(room.rank(torch.stack([table(token_id) for token_id in tokens]), paths, width))
    return tree


def drawn_path(params: SamplingParams, length: int) -> list[int]:
    sequence = Sequence("a", [1], params, VOCAB)
    sampler, path = TokenSampler(sequence, VOCAB), [1]
    for _ in range(length):
        path.append(sampler.draw(table(path[-1])))
    return path[1:]


@pytest.mark.parametrize("params", [PARAMS, GREEDY, PARAMS.model_copy(update={"seed": 11})])
def test_the_path_that_will_be_drawn_is_the_best_one_where_the_guess_is_right(params: SamplingParams) -> None:
    children, node, found = grow(params).best(1000)[0].children(), -1, []
    while node in children:
        token_id, node = next(iter(children[node].items()))  # the likeliest
        found.append(token_id)
    assert len(found) >= 2
    assert found == drawn_path(params, len(found)), "the noise of the coming positions is not in the scores"


def test_tokens_of_the_text_are_penalised_as_they_will_be() -> None:
    favourite = int(table(1).argmax())
    params = GREEDY.model_copy(update={"repetition_penalty": 4.0})
    sequence = Sequence("a", [favourite, 1], params, VOCAB)
    tree = GrowingTree(sequence, 1, 3, EVERYTHING_PAYS)
    tree.add_root(room_of(sequence).rank(table(1)[None], [[]], 3)[0])
    first = tree.best(1)[0].token_ids[0]
    assert first == TokenSampler(sequence, VOCAB).draw(table(1))
    assert first != favourite


def test_a_tree_has_at_most_its_depth_width_and_nodes() -> None:
    tree = grow(PARAMS, max_depth=3, width=3)
    assert tree.num_levels == 3
    whole = tree.best(1000)[0]
    assert len(whole) == 3 + 9 + 9  # of the second level's nine, three were expanded
    assert max(whole.depths()) == 3
    assert max(len(children) for children in whole.children().values()) == 3
    for max_nodes in (0, 1, 2, 7, 20):
        small = tree.best(max_nodes)[0]
        assert len(small) == max_nodes
        assert all(parent < node for node, parent in enumerate(small.parents))


def test_the_best_nodes_are_those_with_the_likeliest_paths() -> None:
    tree = grow(PARAMS)
    best, whole = tree.best(6)[0], tree.best(1000)[0]
    assert best.token_ids == whole.token_ids[:6]
    scores = sorted(tree._scores, reverse=True)
    assert sorted(tree._scores[:3])[-1] == scores[0]
    assert all(0 >= score > -math.inf for score in scores)


def test_a_dear_row_is_not_drafted_and_a_dear_level_is_not_grown() -> None:
    free = grow(PARAMS).best(60)[0]
    dear = grow(PARAMS, prices=TreePrices(row=0.2, level=0.0, coverage=0.9)).best(60)[0]
    assert 0 < len(dear) < len(free)
    assert dear.token_ids == free.token_ids[: len(dear)]
    assert grow(PARAMS, prices=TreePrices(row=0.0, level=5.0, coverage=0.9)).num_levels == 1
    assert grow(PARAMS, prices=TreePrices(row=1.0, level=0.0, coverage=0.9)).best(60)[0] == DraftTree()


def costs(row_seconds: float) -> StepCosts:
    return StepCosts((64,), 0.01 + row_seconds * np.array([ROW_COUNTS], dtype=float))


def test_prices_follow_what_rows_and_levels_cost() -> None:
    cheap = PricePlanner(costs(1e-5), 0.001).prices(1000, 1)
    dear = PricePlanner(costs(1e-3), 0.001).prices(1000, 1)
    assert isinstance(cheap, TreePrices)
    assert isinstance(dear, TreePrices)
    assert cheap.row < dear.row
    assert cheap.row == pytest.approx(2.5 / (0.01 + 9e-5 + 0.003 + 0.001) * 1e-5, rel=1e-6)
    slow = PricePlanner(costs(1e-5), 0.01).prices(1000, 1)
    assert isinstance(slow, TreePrices)
    assert slow.level > cheap.level


def test_a_plan_that_brings_more_tokens_raises_prices_and_is_restored() -> None:
    planner = PricePlanner(costs(1e-4), 0.001)
    before = planner.prices(64, 1)
    for _ in range(50):
        planner.observe(6, 8, 3, 4.0)
    after = planner.prices(64, 1)
    assert isinstance(before, TreePrices)
    assert isinstance(after, TreePrices)
    assert after.row > before.row
    other = PricePlanner(costs(1e-4), 0.001)
    other.restore(planner.state())
    assert other.prices(64, 1) == after


def test_levels_of_a_slower_machine_are_not_dearer_here() -> None:
    slow, here = PricePlanner(costs(1e-6), 0.5), PricePlanner(costs(1e-6), 0.0005)
    for _ in range(20):
        slow.observe(4, 6, 3, 3.0)
    here.restore(slow.state())
    assert here.prices(64, 1).level < 1.0 < slow.prices(64, 1).level


def test_probabilities_are_trusted_as_far_as_they_came_true() -> None:
    planner, sure = PricePlanner(costs(1e-4), 0.001), PricePlanner(costs(1e-4), 0.001)
    for _ in range(200):
        planner.observe(3, 8, 3, 4.0)
        sure.observe(3, 8, 3, 1.0)
    below, above = planner.prices(64, 1), sure.prices(64, 1)
    assert isinstance(below, TreePrices)
    assert isinstance(above, TreePrices)
    assert below.trust == pytest.approx(0.5, rel=0.05)
    assert above.trust == pytest.approx(2.0, rel=0.05)
    assert above.pays_row(above.row)
    assert not below.pays_row(below.row)


def test_a_tree_tells_how_many_of_its_nodes_it_expects_to_be_accepted() -> None:
    tree = grow(PARAMS)
    best, num_expected = tree.best(5)
    assert len(best) == 5
    assert num_expected == pytest.approx(sum(math.exp(score) for score in sorted(tree._scores)[-5:]))


@pytest.mark.parametrize("state", [{}, {"griffin_plan": np.zeros(4)}, {"griffin_plan": np.full(6, np.nan)}])
def test_an_unfit_plan_is_refused_and_changes_nothing(state: dict[str, np.ndarray]) -> None:
    planner = PricePlanner(costs(1e-4), 0.001)
    before = planner.prices(64, 1)
    with pytest.raises(ValueError, match="griffin's plan"):
        planner.restore(state)
    assert planner.prices(64, 1) == before
