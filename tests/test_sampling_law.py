"""The drawn tokens follow the model's law, whatever is drafted; rules of published code do not, and are caught."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from jobs.sampling import SamplingParams
from worker.engine import Slot, walk
from worker.sampling import TokenSampler, penalise, process
from worker.sequence import Sequence
from worker.stopping import StopRule
from worker.tree import DraftTree

VOCAB = 6
NUM_TRIALS = 12_000
PROMPT = [0]
# Logits of the next token after each token: a little model whose exact law can be written down.
TABLE = torch.tensor(
    [[math.sin(3.0 * row + 1.7 * column) * 1.5 + 0.4 for column in range(VOCAB)] for row in range(VOCAB)]
)
# Three likely continuations, each with children: room to be biased in.
TREE = DraftTree([1, 4, 3, 1, 4, 2, 1, 5], [-1, -1, -1, 0, 0, 1, 1, 2])

Verifier = Callable[[Sequence, DraftTree], list[int]]


def p_value(statistic: float, degrees: int) -> float:
    """Upper tail of the chi-square law (Wilson and Hilferty 1931), good to a few percent down to 1e-8."""
    spread = 2.0 / (9.0 * degrees)
    z = ((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(z / math.sqrt(2))


def exact_law(params: SamplingParams) -> dict[tuple[int, int], float]:
    """Probability of every pair of first two tokens, from the definition."""

    def law(history: list[int]) -> torch.Tensor:
        seen = torch.zeros(VOCAB, dtype=torch.bool)
        seen[history] = True
        scores = penalise(TABLE[history[-1]], seen, params.repetition_penalty)
        return torch.softmax(process(scores, params).double(), dim=-1)

    first = law(PROMPT)
    return {
        (a, b): float(first[a] * law([*PROMPT, a])[b])
        for a in range(VOCAB)
        if first[a] > 0
        for b in range(VOCAB)
        if law([*PROMPT, a])[b] > 0
    }


def rows_of(sequence: Sequence, tree: DraftTree) -> torch.Tensor:
    """The target's logits at the root and at every node, `[num_rows, vocab]`."""
    return TABLE[[int(sequence.token_ids[-1]), *tree.token_ids]]


def ours(sequence: Sequence, tree: DraftTree) -> list[int]:
    slot = Slot(sequence, None, TokenSampler(sequence, VOCAB), StopRule(sequence, frozenset()))  # type: ignore[arg-type]
    return walk(slot, tree, rows_of(sequence, tree))[1]


def plain_steps(verifier: Verifier, tree: DraftTree, params: SamplingParams, seed: int) -> tuple[int, int]:
    """Two tokens: one verified step, and plain decoding for what it did not commit."""
    sequence = Sequence("s", PROMPT, params.model_copy(update={"seed": seed}), VOCAB)
    sequence.extend(verifier(sequence, tree)[:2])
    if sequence.num_generated_tokens < 2:
        sequence.extend(ours(sequence, DraftTree())[:1])
    return int(sequence.output_ids[0]), int(sequence.output_ids[1])


def gate(verifier: Verifier, params: SamplingParams, tree: DraftTree = TREE) -> float:
    """The p-value of `NUM_TRIALS` pairs against the exact law; 0 where a pair has no probability at all."""
    law = exact_law(params)
    counts = Counter(plain_steps(verifier, tree, params, seed) for seed in range(NUM_TRIALS))
    if set(counts) - set(law):
        return 0.0
    statistic = sum((counts[pair] - NUM_TRIALS * p) ** 2 / (NUM_TRIALS * p) for pair, p in law.items())
    return p_value(statistic, len(law) - 1)


PLAIN = SamplingParams(max_tokens=100)
PENALISED = SamplingParams(max_tokens=100, repetition_penalty=1.6)
FILTERED = SamplingParams(max_tokens=100, temperature=0.8, top_k=5, top_p=0.95, min_p=0.05, repetition_penalty=1.2)
SETTINGS = pytest.mark.parametrize("params", [PLAIN, PENALISED, FILTERED], ids=["plain", "penalised", "filtered"])


@SETTINGS
def test_verified_tokens_follow_the_law(params: SamplingParams) -> None:
    assert gate(ours, params) > 1e-3


@SETTINGS
def test_verified_tokens_are_those_of_plain_decoding(params: SamplingParams) -> None:
    for seed in range(500):
        assert plain_steps(ours, TREE, params, seed) == plain_steps(ours, DraftTree(), params, seed)


def test_a_drafter_that_knows_the_noise_cannot_bias_the_law() -> None:
    def knowing(sequence: Sequence, tree: DraftTree) -> list[int]:
        best = torch.topk(TABLE[PROMPT[-1]] + sequence.noise.row(1), 2).indices.tolist()
        return ours(sequence, DraftTree([*best, best[0]], [-1, -1, 0]))

    assert gate(knowing, PLAIN) > 1e-3


def test_the_gate_catches_an_independent_sample_per_leaf_with_the_longest_match_winning() -> None:
    """TokenSwift's published verification: every leaf's path is checked against draws of its own."""

    def longest_wins(sequence: Sequence, tree: DraftTree) -> list[int]:
        generator = torch.Generator().manual_seed(int(sequence.sampling.seed or 0))
        best: list[int] = []
        for leaf in set(range(len(tree))) - set(tree.parents):
            path = [leaf]
            while tree.parents[path[0]] >= 0:
                path.insert(0, tree.parents[path[0]])
            rows = TABLE[[PROMPT[-1], *(tree.token_ids[node] for node in path)]]
            draws = torch.multinomial(torch.softmax(rows, -1), 1, generator=generator).flatten().tolist()
            matches = itertools.takewhile(
                lambda pair: pair[0] == pair[1], zip(path_ids(tree, path), draws, strict=False)
            )
            num_accepted = len(list(matches))
            best = max(best, draws[: num_accepted + 1], key=len)
        return best

    assert gate(longest_wins, PLAIN) < 1e-6


def path_ids(tree: DraftTree, path: list[int]) -> list[int]:
    return [tree.token_ids[node] for node in path]


def test_the_gate_catches_a_penalty_that_ignores_the_ancestors_in_the_tree() -> None:
    def forgetful(sequence: Sequence, tree: DraftTree) -> list[int]:
        sampler = TokenSampler(sequence, VOCAB)
        assert sampler._window is not None
        sampler._window.push = lambda token_id: None  # type: ignore[method-assign]
        slot = Slot(sequence, None, sampler, StopRule(sequence, frozenset()))  # type: ignore[arg-type]
        return walk(slot, tree, rows_of(sequence, tree))[1]

    assert gate(forgetful, PENALISED) < 1e-6


def test_the_gate_catches_a_bonus_token_without_temperature() -> None:
    def bare_bonus(sequence: Sequence, tree: DraftTree) -> list[int]:
        committed = ours(sequence, tree)
        last = ([*PROMPT, *committed])[-2]
        scores = TABLE[last] + sequence.noise.row(len(sequence) + len(committed) - 1)
        return [*committed[:-1], int(torch.argmax(scores))]

    assert gate(bare_bonus, PLAIN.model_copy(update={"temperature": 0.6})) < 1e-6
