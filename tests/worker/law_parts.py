"""A small model with a known law, and the chi-square gate."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable

import torch

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.constraints.constrained_tree import Constraints
from swiftbatch.worker.constraints.thinking import Markers, Thinking, ThinkingRule
from swiftbatch.worker.sampling.batch_sampler import masked_by
from swiftbatch.worker.sampling.draft_tree import DraftTree, walk
from swiftbatch.worker.sampling.logits_processors import penalise
from swiftbatch.worker.sampling.sampler import TokenSampler, process
from swiftbatch.worker.sampling.sequence import Rule, Sequence
from tests.worker.constraints.words import allowed_behind, grammar

VOCAB = 6
NUM_TRIALS = 2_000
PROMPT = [1]
# Logits of the next token after each token, with a computable law.
TABLE = torch.tensor(
    [[math.sin(3.0 * row + 1.7 * column) * 1.5 + 0.4 for column in range(VOCAB)] for row in range(VOCAB)]
)
# Three likely continuations with children, one repeated: room for bias.
TREE = DraftTree([3, 0, 2, 3, 4, 2, 5, 1], [-1, -1, -1, 0, 0, 1, 1, 2])
PLAIN = SamplingParams(max_tokens=100)
LETTERS = ("a", "b", "c", "d", "e")  # tokens 0 to 4 of a structured text; 5 is its end
MARKER = (3, 1)  # closes an open thought
TEXTS = {"ab", "aca", "bb", "bda", "dca", "dd", "e"}  # of some tokens each, some also in the tree
WORDS = ((3, 4), (0, 0), (5,))  # tokens of bad words, if any

Verifier = Callable[[Sequence, DraftTree], list[int]]


def p_value(statistic: float, degrees: int) -> float:
    """Return the chi-square upper tail (Wilson and Hilferty 1931), within a few percent down to 1e-8."""
    spread = 2.0 / (9.0 * degrees)
    z = ((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(z / math.sqrt(2))


def exact_law(params: SamplingParams) -> dict[tuple[int, int], float]:
    """Return the probability of each pair of first tokens."""

    def law(history: list[int]) -> torch.Tensor:
        seen = torch.zeros(VOCAB, dtype=torch.bool)
        seen[history] = True
        scores = penalise(shifted(history, params), seen, params.repetition_penalty)
        for token_id in set(history[len(PROMPT) :]):
            count = history[len(PROMPT) :].count(token_id)
            scores[token_id] -= params.frequency_penalty * count + params.presence_penalty
        return torch.softmax(process(scores, params).double(), dim=-1)

    first = law(PROMPT)
    return {
        (a, b): float(first[a] * law([*PROMPT, a])[b])
        for a in range(VOCAB)
        if first[a] > 0
        for b in range(VOCAB)
        if law([*PROMPT, a])[b] > 0
    }


def shifted(history: list[int], params: SamplingParams) -> torch.Tensor:
    """Return biased logits, without impossible ones."""
    scores, output = TABLE[history[-1]].clone(), history[len(PROMPT) :]
    for token_id, bias in params.logit_bias:
        scores[token_id] += bias
    if len(output) < params.min_tokens:
        scores[list(params.stop_token_ids)] = -math.inf
    for *begin, last in WORDS if params.bad_words else ():
        if output[len(output) - len(begin) :] == begin:
            scores[last] = -math.inf
    budget = params.thinking_token_budget
    if budget is not None and len(output) >= budget and MARKER not in itertools.pairwise(output):
        forced = MARKER[1] if output[-1:] == [MARKER[0]] else MARKER[0]
        scores[[token_id for token_id in range(VOCAB) if token_id != forced]] = -math.inf
    if params.structured_outputs is not None:
        allowed = allowed_behind(TEXTS, "".join(LETTERS[token_id] for token_id in output), LETTERS)
        scores[[token_id for token_id in range(VOCAB) if token_id not in allowed]] = -math.inf
    return scores


def rows_of(sequence: Sequence, tree: DraftTree) -> torch.Tensor:
    """Return logits at root and nodes, `[num_rows, vocab]`."""
    return TABLE[[int(sequence.token_ids[-1]), *tree.token_ids]]


def ours(sequence: Sequence, tree: DraftTree) -> list[int]:
    given = Constraints(sequence).of_tree(tree)
    masks = None if given.masks is None else given.masks.words
    return walk(
        given.tree, rows_of(sequence, given.tree), TokenSampler(sequence, VOCAB).draw, masked=masked_by(masks)
    ).drawn


@functools.cache
def structured() -> Rule:
    return grammar(LETTERS, choice=sorted(TEXTS))


def rules(params: SamplingParams) -> tuple[Rule, ...]:
    if params.thinking_token_budget is not None:
        return (ThinkingRule(Thinking(Markers((0,), MARKER), is_open=True), params.thinking_token_budget),)
    return () if params.structured_outputs is None else (structured(),)


def plain_steps(verifier: Verifier, tree: DraftTree, params: SamplingParams, seed: int) -> tuple[int, int]:
    """Draw two tokens: one verified step, and plain decoding for the rest."""
    words = WORDS if params.bad_words else ()
    params = params.model_copy(update={"seed": seed})
    sequence = Sequence("s", PROMPT, params, VOCAB, bad_word_ids=words, rules=rules(params))
    sequence.extend(verifier(sequence, tree)[:2])
    if sequence.num_generated_tokens < 2:
        sequence.extend(ours(sequence, DraftTree())[:1])
    return int(sequence.output_ids[0]), int(sequence.output_ids[1])


def gate(verifier: Verifier, params: SamplingParams, tree: DraftTree = TREE, num_trials: int = NUM_TRIALS) -> float:
    """Return the p-value of pairs against the exact law; 0 if a pair is impossible."""
    law = exact_law(params)
    counts: Counter[tuple[int, int]] = Counter()
    for seed in range(num_trials):
        pair = plain_steps(verifier, tree, params, seed)
        if pair not in law:
            return 0.0
        counts[pair] += 1
    statistic = sum((counts[pair] - num_trials * p) ** 2 / (num_trials * p) for pair, p in law.items())
    return p_value(statistic, len(law) - 1)
