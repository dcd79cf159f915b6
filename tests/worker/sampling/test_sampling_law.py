"""Drawn tokens follow the model's law with any drafts."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.constraints.constrained_tree import Constraints
from swiftbatch.worker.drafters.tokenswift.tokenswift import NgramTable, Sources, digit_tree
from swiftbatch.worker.sampling.draft_tree import DraftTree, walk
from swiftbatch.worker.sampling.logits_processors import only_allowed, penalise
from swiftbatch.worker.sampling.sampler import TokenSampler, process
from swiftbatch.worker.sampling.sequence import Sequence
from tests.worker.law_parts import (
    NUM_TRIALS,
    PLAIN,
    PROMPT,
    TABLE,
    TEXTS,
    TREE,
    VOCAB,
    gate,
    ours,
    plain_steps,
    rows_of,
)

pytestmark = pytest.mark.long


def paper_tree() -> DraftTree:
    """TokenSwift's tree 1,3,3,3 has the 20 most frequent 4-grams of a text merged in."""
    law = torch.softmax(TABLE, dim=-1)
    levels = []
    for depth in range(4):  # heads without parents know the law so many tokens ahead
        ahead = torch.linalg.matrix_power(law, depth + 1)[PROMPT[-1]].log().tolist()
        levels.append(sorted(((logprob, token) for token, logprob in enumerate(ahead)), reverse=True))
    generator = torch.Generator().manual_seed(1)
    text = list(PROMPT)
    for _ in range(500):
        text.append(int(torch.multinomial(law[text[-1]], 1, generator=generator)))
    table = NgramTable(4)
    table.extend(text)
    best = levels[0][0]
    ngrams = [
        [best, *((math.log(count / len(text)), token) for token in behind)]
        for behind, count in table.most_frequent(best[1], 20)
    ]
    best_digits = [level[:digit] for level, digit in zip(levels, (1, 3, 3, 3), strict=True)]
    return digit_tree(Sources(best_digits, ngrams), max_nodes=100, max_depth=4)


PAPER_TREE = paper_tree()

PENALISED = SamplingParams(max_tokens=100, repetition_penalty=1.6)
FILTERED = SamplingParams(max_tokens=100, temperature=0.8, top_k=5, top_p=0.95, min_p=0.05, repetition_penalty=1.2)
PAPER = SamplingParams(max_tokens=100, min_p=0.1, repetition_penalty=1.2)  # TokenSwift's setting; its window is 1024
BY_COUNTS = SamplingParams(max_tokens=100, frequency_penalty=1.5, presence_penalty=0.7)
ADJUSTED = SamplingParams(
    max_tokens=100,
    frequency_penalty=-0.8,
    presence_penalty=1.9,
    repetition_penalty=1.3,
    logit_bias={"2": 1.2, "4": -0.7},  # type: ignore[arg-type]
    min_tokens=2,
    stop_token_ids=(1,),
    bad_words=("any",),
)
STRUCTURED = SamplingParams(
    max_tokens=100,
    repetition_penalty=1.3,
    frequency_penalty=0.8,
    min_p=0.02,
    structured_outputs={"choice": sorted(TEXTS)},  # type: ignore[arg-type]
)
THINKING = SamplingParams(max_tokens=100, repetition_penalty=1.3, min_p=0.02, thinking_token_budget=1)
SETTINGS = {
    "plain": (PLAIN, TREE),
    "penalised": (PENALISED, TREE),
    "filtered": (FILTERED, TREE),
    "tokenswift": (PAPER, PAPER_TREE),
    "by counts": (BY_COUNTS, TREE),
    "adjusted": (ADJUSTED, TREE),
    "structured": (STRUCTURED, TREE),
    "thinking": (THINKING, TREE),
}
# with the rules of "filtered", "adjusted" and "thinking"; each seed's tokens are plain decoding's after all trees
OF_OTHERS = ("plain", "penalised", "tokenswift", "by counts", "structured")


@pytest.mark.parametrize(
    ("params", "tree"),
    [
        pytest.param(*setting, id=name, marks=pytest.mark.slow if name in OF_OTHERS else ())
        for name, setting in SETTINGS.items()
    ],
)
@pytest.mark.parametrize("num_trials", [NUM_TRIALS, pytest.param(10_000, marks=pytest.mark.slow)])
def test_verified_tokens_follow_the_law(params: SamplingParams, tree: DraftTree, num_trials: int) -> None:
    assert gate(ours, params, tree, num_trials) > 1e-3


@pytest.mark.parametrize(("params", "tree"), SETTINGS.values(), ids=SETTINGS)
def test_verified_tokens_are_those_of_plain_decoding(params: SamplingParams, tree: DraftTree) -> None:
    for seed in range(60):
        assert plain_steps(ours, tree, params, seed) == plain_steps(ours, DraftTree(), params, seed)


def test_the_papers_tree_is_the_digits_tree_and_more() -> None:
    depths = PAPER_TREE.depths()
    assert [depths.count(depth) >= width for depth, width in ((1, 1), (2, 3), (3, 9), (4, 27))] == [True] * 4
    assert len(PAPER_TREE) > 40


def test_a_drafter_that_knows_the_noise_cannot_bias_the_law() -> None:
    def knowing(sequence: Sequence, tree: DraftTree) -> list[int]:
        best = torch.topk(TABLE[PROMPT[-1]] + sequence.noise.row(1), 2).indices.tolist()
        return ours(sequence, DraftTree([*best, best[0]], [-1, -1, 0]))

    assert gate(knowing, PLAIN) > 1e-3


def longest_of_independent_leaves(sequence: Sequence, tree: DraftTree) -> list[int]:
    """TokenSwift's published rule: each leaf's path against its own draws, the longest wins.

    The penalty only knows tokens before the step.
    """
    generator = torch.Generator().manual_seed(int(sequence.sampling.seed or 0))
    seen = torch.zeros(VOCAB, dtype=torch.bool)
    seen[sequence.token_ids] = True
    scores = penalise(TABLE, seen, sequence.sampling.repetition_penalty)
    laws = torch.stack([torch.softmax(process(row, sequence.sampling), dim=-1) for row in scores])
    best: list[int] = []
    for path in leaf_paths(tree):
        rows = laws[[PROMPT[-1], *path_ids(tree, path)]]
        draws = torch.multinomial(rows, 1, generator=generator).flatten().tolist()
        matches = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(path_ids(tree, path), draws, strict=False))
        num_accepted = len(list(matches))
        best = max(best, draws[: num_accepted + 1], key=len)
    return best


@pytest.mark.parametrize(
    ("params", "tree"),
    [pytest.param(PLAIN, TREE, id="plain"), pytest.param(PAPER, PAPER_TREE, id="tokenswift", marks=pytest.mark.slow)],
)
def test_the_gate_catches_an_independent_sample_per_leaf_with_the_longest_match_winning(
    params: SamplingParams, tree: DraftTree
) -> None:
    assert gate(longest_of_independent_leaves, params, tree) < 1e-6


def leaf_paths(tree: DraftTree) -> list[list[int]]:
    """Return the nodes to each leaf."""
    paths: list[list[int]] = []
    for leaf in sorted(set(range(len(tree))) - set(tree.parents)):
        path = [leaf]
        while tree.parents[path[0]] >= 0:
            path.insert(0, tree.parents[path[0]])
        paths.append(path)
    return paths


def path_ids(tree: DraftTree, path: list[int]) -> list[int]:
    return [tree.token_ids[node] for node in path]


@pytest.mark.parametrize(
    ("params", "tree"),
    [
        pytest.param(PENALISED, TREE, id="penalised"),
        pytest.param(PAPER, PAPER_TREE, id="tokenswift", marks=pytest.mark.slow),
    ],
)
def test_the_gate_catches_a_penalty_that_ignores_the_ancestors_in_the_tree(
    params: SamplingParams, tree: DraftTree
) -> None:
    def forgetful(sequence: Sequence, tree: DraftTree) -> list[int]:
        sampler = TokenSampler(sequence, VOCAB)
        assert sampler._window is not None
        sampler._window.push = lambda token_id: None  # type: ignore[method-assign]
        return walk(tree, rows_of(sequence, tree), sampler.draw).drawn

    assert gate(forgetful, params, tree) < 1e-6


def test_the_gate_catches_masks_that_ignore_the_ancestors_in_the_tree() -> None:
    def forgetful(sequence: Sequence, tree: DraftTree) -> list[int]:
        masks = Constraints(sequence).of_tree(tree).masks
        assert masks is not None
        drawer = TokenSampler(sequence, VOCAB)
        return walk(
            tree, rows_of(sequence, tree), drawer.draw, masked=lambda row, _: only_allowed(row, masks.words[0])
        ).drawn

    assert gate(forgetful, STRUCTURED) < 1e-6


@pytest.mark.parametrize(
    "params", [pytest.param(BY_COUNTS, id="by counts"), pytest.param(ADJUSTED, id="adjusted", marks=pytest.mark.slow)]
)
def test_the_gate_catches_counts_that_ignore_the_ancestors_in_the_tree(params: SamplingParams) -> None:
    def forgetful(sequence: Sequence, tree: DraftTree) -> list[int]:
        sampler = TokenSampler(sequence, VOCAB)
        counts = sampler._counts
        assert counts is not None

        def draw(logits: torch.Tensor) -> int:
            sampler._counts = counts.clone()
            return sampler.draw(logits)

        return walk(tree, rows_of(sequence, tree), draw).drawn

    assert gate(forgetful, params) < 1e-6


def test_the_gate_catches_bad_words_that_may_begin_in_the_tree() -> None:
    def forgetful(sequence: Sequence, tree: DraftTree) -> list[int]:
        sampler = TokenSampler(sequence, VOCAB)

        def draw(logits: torch.Tensor) -> int:
            sampler._recent = []
            return sampler.draw(logits)

        return walk(tree, rows_of(sequence, tree), draw).drawn

    assert gate(forgetful, ADJUSTED) < 1e-6


def test_the_gate_catches_a_bonus_token_without_temperature() -> None:
    def bare_bonus(sequence: Sequence, tree: DraftTree) -> list[int]:
        committed = ours(sequence, tree)
        last = ([*PROMPT, *committed])[-2]
        scores = TABLE[last] + sequence.noise.row(len(sequence) + len(committed) - 1)
        return [*committed[:-1], int(torch.argmax(scores))]

    assert gate(bare_bonus, PLAIN.model_copy(update={"temperature": 0.3})) < 1e-6
