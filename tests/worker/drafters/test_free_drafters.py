"""Further promises of drafters without trained parts."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bench.variants import create_bench_drafter
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.drafter_interface import Drafter
from swiftbatch.worker.drafters.static_recycling import measured_tree
from swiftbatch.worker.drafters.token_recycling import PairTable, RecyclingMatrix
from swiftbatch.worker.sampling.draft_tree import ROOT, TOP_K, DraftTree, Verification
from swiftbatch.worker.sampling.sampler import TokenSampler
from swiftbatch.worker.sampling.sequence import Sequence
from tests.work_counts import num_lines
from tests.worker.drafters.drafter_parts import free_rows, proposed

VOCAB = 64
PARAMS = SamplingParams(max_tokens=4000, temperature=1.0, min_p=0.1, seed=7)
GREEDY = SamplingParams(max_tokens=4000, temperature=0.0, seed=7)
NO_CACHE: Any = None
# all that drafters without weights need
TABLE: Any = SimpleNamespace(vocab_size=VOCAB, files=SimpleNamespace(path=Path()))


class TableTarget:
    """Logits depend on the last token."""

    def __init__(self, seed: int = 0) -> None:
        self._logits = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2.5

    def step(self, drafter: Drafter, sequence: Sequence, max_nodes: int) -> Verification:
        max_depth = max(sequence.num_remaining_tokens - 1, 0)
        tree = proposed(drafter, sequence, max_nodes, max_depth)
        verification = self.verify(sequence, tree, TokenSampler(sequence, VOCAB))
        sequence.extend(verification.committed_ids)
        drafter.update(sequence, verification)
        return verification

    def verify(self, sequence: Sequence, tree: DraftTree, sampler: TokenSampler) -> Verification:
        row_token_ids = np.array([sequence.token_ids[-1], *tree.token_ids], dtype=np.int64)
        logits = self._logits[torch.from_numpy(row_token_ids)]
        children, path, committed = tree.children(), [ROOT], []
        while True:
            committed.append(sampler.draw(logits[path[-1] + 1]))
            node = children.get(path[-1], {}).get(committed[-1])
            if node is None:
                break
            path.append(node)
        top = torch.log_softmax(logits, dim=-1).topk(TOP_K)
        return Verification(tree, path[1:], committed, row_token_ids, top.indices.numpy(), top.values.numpy())


def new_sequence(prompt: list[int] | None = None, params: SamplingParams = PARAMS, name: str = "a") -> Sequence:
    return Sequence(name, prompt or [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], params, VOCAB)


def generate(drafter: Drafter, sequence: Sequence, num_steps: int, max_nodes: int = 8) -> list[Verification]:
    target = TableTarget()
    return [target.step(drafter, sequence, max_nodes) for _ in range(num_steps)]


def warm(name: str, params: SamplingParams = PARAMS, num_steps: int = 30) -> tuple[Drafter, Sequence]:
    drafter, sequence = create_bench_drafter(name, TABLE, free_rows), new_sequence(params=params)
    drafter.start(sequence, NO_CACHE)
    generate(drafter, sequence, num_steps)
    return drafter, sequence


def mean_acceptance_length(verifications: list[Verification]) -> float:
    return 1 + sum(v.num_accepted_tokens for v in verifications) / len(verifications)


def test_autoregressive_proposes_nothing() -> None:
    assert len(proposed(create_bench_drafter("autoregressive", TABLE, free_rows), new_sequence(), 8, 8)) == 0


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([1, 2, 3, 9, 7, 2, 3, 8, 1, 2, 3], [9, 7, 2, 3]),  # three tokens match further back than two do
        ([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], [8, 1, 2, 3]),  # the later of two places
        ([5, 3, 9, 6, 3], [9, 6, 3]),  # one token only
        ([4, 4], [4]),  # up to the end
        ([1, 2, 3], []),
    ],
)
def test_prompt_lookup_copies_from_the_longest_and_latest_match(prompt: list[int], expected: list[int]) -> None:
    drafter, sequence = create_bench_drafter("prompt-lookup", TABLE, free_rows), new_sequence(prompt)
    drafter.start(sequence, NO_CACHE)
    assert proposed(drafter, sequence, 4, 9) == DraftTree.chain(expected)


@pytest.mark.parametrize("name", ["prompt-lookup", "suffix"])
def test_a_repeated_text_is_drafted_as_one_path(name: str) -> None:
    text = [10, 20, 30, 40, 50, 60, 11, 21]
    drafter, sequence = create_bench_drafter(name, TABLE, free_rows), new_sequence(text * 4 + text[:3], GREEDY)
    drafter.start(sequence, NO_CACHE)
    assert proposed(drafter, sequence, 5, 9) == DraftTree.chain([40, 50, 60, 11, 21])


@pytest.mark.parametrize("name", ["prompt-lookup", "suffix"])
def test_a_long_prompt_is_taken_in_at_constant_cost_per_token(name: str) -> None:
    tokens = np.random.default_rng(0).integers(0, VOCAB, 40_000).tolist()
    drafter = create_bench_drafter(name, TABLE, free_rows)
    few, many = (
        num_lines(functools.partial(drafter.start, new_sequence(tokens[:length]), NO_CACHE))
        for length in (2500, 40_000)
    )
    assert many < 16 * 1.2 * few


@pytest.mark.parametrize("params", [PARAMS, GREEDY], ids=["T=1", "T=0"])
def test_recycling_starts_hot_with_the_next_job(params: SamplingParams) -> None:
    drafter, first = warm("token-recycling", params, num_steps=100)
    drafter.stop(first)
    second = new_sequence([8, 17], params, "b")
    drafter.start(second, NO_CACHE)
    cold_drafter, cold = create_bench_drafter("token-recycling", TABLE, free_rows), new_sequence([8, 17], params, "b")
    cold_drafter.start(cold, NO_CACHE)
    hot = mean_acceptance_length(generate(drafter, second, 10))
    assert hot > mean_acceptance_length(generate(cold_drafter, cold, 10)) + 1


def test_drafting_with_the_noise_accepts_more() -> None:
    lengths = {}
    for name in ("token-recycling", "token-recycling-no-noise"):
        drafter, sequence = warm(name, num_steps=100)
        lengths[name] = mean_acceptance_length(generate(drafter, sequence, 30, max_nodes=4))
    # The matrix knows this target, so with the noise most of the four nodes are on the drawn path.
    assert lengths["token-recycling"] > 3
    assert lengths["token-recycling"] > 1.5 * lengths["token-recycling-no-noise"]


def test_the_most_recent_row_of_a_token_stays() -> None:
    drafter, sequence = create_bench_drafter("token-recycling", TABLE, free_rows), new_sequence([4, 9], GREEDY)
    top_ids = np.arange(3 * TOP_K).reshape(3, TOP_K)
    top_logprobs = np.tile(np.log(np.linspace(0.3, 0.01, TOP_K, dtype=np.float32)), (3, 1))
    sequence.extend([9])
    drafter.update(
        sequence, Verification(DraftTree([5, 9], [ROOT, ROOT]), [], [9], np.array([9, 5, 9]), top_ids, top_logprobs)
    )
    assert proposed(drafter, sequence, 3, 1) == DraftTree([16, 17, 18], [ROOT] * 3)


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.pop("recycling_ids"),
        lambda state: state.update(recycling_ids=state["recycling_ids"][:-1]),
        lambda state: state.update(recycling_logprobs=state["recycling_logprobs"].astype(np.float64)),
        lambda state: state.update(recycling_ids=state["recycling_ids"] + VOCAB),
        lambda state: state["recycling_logprobs"].__setitem__((3, 0), np.nan),
        lambda state: state["recycling_logprobs"].__setitem__((3, 0), 5.0),
        lambda state: state["recycling_logprobs"].__setitem__((slice(None), 1), 0.0),
    ],
    ids=["missing", "short", "wrong type", "outside the vocabulary", "NaN", "above 0", "not the best first"],
)
@pytest.mark.parametrize("engine_name", ["token-recycling", "token-recycling-static"])
def test_unfit_state_is_refused_and_changes_nothing(damage, engine_name: str) -> None:  # type: ignore[no-untyped-def]
    drafter, sequence = warm(engine_name)
    expected = proposed(drafter, sequence, 15, 6)
    state = drafter.state(sequence)
    damage(state)
    with pytest.raises(ValueError, match="recycling matrix"):
        drafter.restore(sequence, state)
    assert proposed(drafter, sequence, 15, 6) == expected


def test_tokens_that_min_p_cuts_off_are_not_drafted() -> None:
    drafter, sequence = create_bench_drafter("token-recycling", TABLE, free_rows), new_sequence([4, 9])
    logprobs = np.log(np.array([[0.9, 0.02, 0.01, 0.01, 0.01, 0.01, 0.01, 0.01]], dtype=np.float32))
    sequence.extend([9])
    drafter.update(sequence, Verification(DraftTree(), [], [9], np.array([9]), np.arange(TOP_K)[None] + 20, logprobs))
    assert proposed(drafter, sequence, 8, 1).token_ids == [20]


def test_a_row_is_averaged_with_the_one_before_it() -> None:
    matrix = RecyclingMatrix(VOCAB, 4, new_share=0.25)
    matrix.write(np.array([3]), np.array([[10, 11]]), np.log(np.array([[0.8, 0.2]])))
    assert matrix.row(3) == ([10, 11], pytest.approx(np.log([0.8, 0.2])))
    matrix.write(np.array([3]), np.array([[12, 10]]), np.log(np.array([[0.6, 0.4]])))
    ids, logprobs = matrix.row(3)
    assert ids == [10, 11, 12] or ids == [10, 12, 11]
    assert dict(zip(ids, np.exp(logprobs), strict=True)) == pytest.approx({10: 0.7, 11: 0.15, 12: 0.15})
    assert matrix.row(4) == ([], [])


def test_pairs_that_share_a_row_take_it_over() -> None:
    table = PairTable(2, new_share=0.5)
    keys = list(range(3 * len(table.keys)))  # three times as many pairs as rows
    logprobs = np.log(np.array([[0.7, 0.3]]))
    for some in np.split(np.array(keys), 96):
        ids = np.stack([some % VOCAB, 1 + some % VOCAB], axis=1)
        table.write(some.tolist(), ids, logprobs.repeat(len(some), axis=0))
    held = [key for key in keys if table.row(key)[0]]
    assert len(held) <= len(table.keys)
    for key in held:
        assert table.row(key) == ([key % VOCAB, 1 + key % VOCAB], pytest.approx(np.log([0.7, 0.3])))


def test_a_prompt_s_own_tokens_are_candidates_behind_those_before_them() -> None:
    drafter = create_bench_drafter("token-recycling", TABLE, free_rows)
    assert not drafter.learns_rows  # nobody computes the logits of prompts for it
    sequence = new_sequence([1, 2, 7, 9, 5, 2, 8, 6, 1, 2], GREEDY)
    drafter.start(sequence, NO_CACHE)
    tree = proposed(drafter, sequence, 3, 1)
    assert sorted(tree.token_ids) == [7, 8]  # behind the pair, and behind the newest such token
    assert proposed(drafter, new_sequence([4, 7], GREEDY), 3, 2).token_ids == [9, 5]
    assert proposed(drafter, new_sequence([3, 4], GREEDY), 3, 2) == DraftTree()


def test_tokens_of_steps_without_candidates_are_learned_from_the_text() -> None:
    drafter = create_bench_drafter("token-recycling", TABLE, free_rows)
    sequence = new_sequence([1, 2], GREEDY)
    drafter.start(sequence, NO_CACHE)
    committed = [11, 12, 13]
    sequence.extend(committed)
    drafter.update(sequence, Verification(DraftTree(), [], committed, [2], None, None, num_steps=3))
    assert proposed(drafter, new_sequence([5, 2], GREEDY), 3, 3).token_ids == [11, 12, 13]


def test_the_static_tree_has_the_papers_size_and_depth() -> None:
    shape = measured_tree(79, 5, TOP_K)
    assert len(shape) + 1 == 80
    assert max(depth for _, depth, _ in shape) + 1 == 6
    assert sum(parent == ROOT for parent, _, _ in shape) == TOP_K
    assert [depth for _, depth, _ in shape] == sorted(depth for _, depth, _ in shape)


@pytest.mark.parametrize("num_nodes", [4, 8, 16, 32])
def test_small_static_trees_are_parts_of_the_large_one(num_nodes: int) -> None:
    def paths(max_nodes: int) -> set[tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {ROOT: ()}
        for node, (parent, _, rank) in enumerate(measured_tree(max_nodes, 5, TOP_K)):
            found[node] = (*found[parent], rank)
        return set(found.values())

    assert len(paths(num_nodes)) == num_nodes + 1
    assert paths(num_nodes) < paths(79)


def test_one_step_of_recycling_is_cheap() -> None:
    drafter, sequence = warm("token-recycling", num_steps=100)
    verification = generate(drafter, sequence, 1, max_nodes=15)[0]

    def step() -> None:
        proposed(drafter, sequence, 15, 8)
        drafter.update(sequence, verification)

    assert num_lines(step) < 10_000  # about 200 with the kernels: 0.2 ms on an idle core
