"""The shares of a forward's rows that bring most tokens per second of all sequences together: arithmetic alone."""

from __future__ import annotations

import numpy as np

from swiftbatch.worker.drafters.step_clock import together
from swiftbatch.worker.drafters.tree_budget import NODE_CHOICES
from swiftbatch.worker.target.step_costs import StepCosts

NUM_ROWS = np.array(NODE_CHOICES) + 1
WORTH_DRAFTING = 1.05  # times the rate without drafts, for a start
NUM_PASSES = 2  # over the shares, each by the rate that the last ones promise: more passes change nothing


def best_shares(
    costs: StepCosts,
    tokens: np.ndarray,
    lengths: np.ndarray,
    overhead: float,
    proposing: float,
    worth: float = WORTH_DRAFTING,
) -> np.ndarray:
    """Choose which of `NODE_CHOICES` each sequence gets, `[num_sequences]`, for most tokens per second of all.

    `tokens [num_sequences, num_choices]` are those that trees of these sizes bring in a step, `lengths [num_sequences]`
    those of the caches. A step takes `overhead` beside its forward, and `proposing` where anything is proposed, in
    seconds. Nothing is drafted where drafts bring less than `worth` times the rate without, which may be less than 1.
    """
    own = costs.own_seconds(NUM_ROWS, lengths)  # [num_sequences, num_choices]
    rates = _rates_alike(costs, tokens, own, overhead, proposing)
    first = int(worth < 1)
    none, best = np.zeros(len(lengths), dtype=int), np.full(len(lengths), first + int(np.argmax(rates[first:])))
    best_rate = rates[best[0]]
    for _ in range(NUM_PASSES if len(lengths) > 1 else 0):  # one sequence alone has no other shares than those
        prices = costs.row_prices(int(NUM_ROWS[best].sum()))
        for price in prices:
            priced = (tokens - best_rate * (own + price * NUM_ROWS)).argmax(axis=1)
            rate = rate_of(costs, tokens, own, priced, overhead, proposing)
            if rate > best_rate:
                best, best_rate = priced, rate
    return best if best_rate > worth * rates[0] else none


def _rates_alike(
    costs: StepCosts, tokens: np.ndarray, own: np.ndarray, overhead: float, proposing: float
) -> list[float]:
    """Tokens per second where all sequences have the same one of `NODE_CHOICES`, for each of these."""
    brought, seconds, number = tokens.sum(axis=0).tolist(), own.sum(axis=0).tolist(), len(tokens)
    rates = []
    for choice, num_nodes in enumerate(NODE_CHOICES):
        forward = costs.shared_seconds(number * (num_nodes + 1)) + seconds[choice]
        rates.append(brought[choice] / (together(forward, overhead) + proposing * bool(num_nodes)))
    return rates


def rate_of(
    costs: StepCosts, tokens: np.ndarray, own: np.ndarray, chosen: np.ndarray, overhead: float, proposing: float
) -> float:
    """Tokens per second where the sequences have the `chosen` ones of `NODE_CHOICES`, `[num_sequences]`.

    `tokens` and `own` seconds are `[num_sequences, num_choices]`, the others as `best_shares` has them.
    """
    sequences = np.arange(len(chosen))
    forward = costs.shared_seconds(int(NUM_ROWS[chosen].sum())) + own[sequences, chosen].sum()
    return float(tokens[sequences, chosen].sum() / (together(forward, overhead) + proposing * bool(chosen.any())))
