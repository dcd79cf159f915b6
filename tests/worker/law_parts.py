"""A little model whose law can be written down, and the chi-square gate that verified tokens must pass."""

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
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.logits_processors import penalise
from swiftbatch.worker.sampling.sampler import TokenSampler, process
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.sampling.token_masks import Rule
from swiftbatch.worker.sampling.verification import walk
from tests.worker.constraints.words import allowed_behind, grammar

VOCAB = 6
NUM_TRIALS = 2_000
PROMPT = [1]
# Logits of the next token after each token: a little model whose exact law can be written down.
TABLE = torch.tensor(
    [[math.sin(3.0 * row + 1.7 * column) * 1.5 + 0.4 for column in range(VOCAB)] for row in range(VOCAB)]
)
# Three likely continuations, each with children, one of them a repetition: room to be biased in.
TREE = DraftTree([3, 0, 2, 3, 4, 2, 5, 1], [-1, -1, -1, 0, 0, 1, 1, 2])
PLAIN = SamplingParams(max_tokens=100)
LETTERS = ("a", "b", "c", "d", "e")  # tokens 0 to 4 of a structured text; 5 is its end
MARKER = (3, 1)  # closes a thought, where one is open
TEXTS = {"ab", "aca", "bb", "bda", "dca", "dd", "e"}  # of some tokens each, some of them those of the tree
WORDS = ((3, 4), (0, 0), (5,))  # tokens of bad words, where there are any

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
    """Logits behind some tokens, with their bias, and without what can't come."""
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
    """The target's logits at the root and at every node, `[num_rows, vocab]`."""
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
    """Two tokens: one verified step, and plain decoding for what it did not commit."""
    words = WORDS if params.bad_words else ()
    params = params.model_copy(update={"seed": seed})
    sequence = Sequence("s", PROMPT, params, VOCAB, bad_word_ids=words, rules=rules(params))
    sequence.extend(verifier(sequence, tree)[:2])
    if sequence.num_generated_tokens < 2:
        sequence.extend(ours(sequence, DraftTree())[:1])
    return int(sequence.output_ids[0]), int(sequence.output_ids[1])


def gate(verifier: Verifier, params: SamplingParams, tree: DraftTree = TREE, num_trials: int = NUM_TRIALS) -> float:
    """The p-value of so many pairs against the exact law; 0 where a pair has no probability at all."""
    law = exact_law(params)
    counts: Counter[tuple[int, int]] = Counter()
    for seed in range(num_trials):
        pair = plain_steps(verifier, tree, params, seed)
        if pair not in law:
            return 0.0
        counts[pair] += 1
    statistic = sum((counts[pair] - num_trials * p) ** 2 / (num_trials * p) for pair, p in law.items())
    return p_value(statistic, len(law) - 1)
