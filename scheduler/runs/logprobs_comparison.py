"""Compares the log-probabilities that a result shows with those that the model gives."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from swiftbatch.jobs.job import Job
from swiftbatch.jobs.logprobs import ShownToken, TokenLogprobs, TokenTexts, shown_logprobs, shown_tokens


class LogprobsDifference(NamedTuple):
    """The largest difference in a result: the token's position, and by how much.

    Without a size, other tokens are named; without a position, the log-probabilities do not fit the tokens.
    """

    position: int | None = None
    size: float | None = None


def largest_difference(
    job: Job,
    shown: Any,
    token_ids: NDArray[np.uint32],
    computed: Iterable[tuple[int, TokenLogprobs]],
    other_draws: Collection[int],
    tokenizer: TokenTexts,
) -> LogprobsDifference | None:
    """Compare parts of an output's log-probabilities, each with its first position; return None if they are equal.

    `other_draws` are positions at which the model draws another token. A job that asked for none may show any number
    of the likeliest tokens.
    """
    try:
        recorded = shown_tokens(job, shown)
        offsets = [] if job.messages is not None else [*shown["text_offset"]]
    except (AttributeError, KeyError, TypeError, ValueError):
        return LogprobsDifference()
    if len(recorded) != len(token_ids) or (
        job.messages is None and offsets != tokenizer.text_offsets(token_ids.tolist())
    ):
        return LogprobsDifference()
    found: list[LogprobsDifference] = []
    for first, logprobs in computed:
        part = token_ids[first : first + len(logprobs)]
        own = shown_tokens(job, shown_logprobs(job, part, logprobs, tokenizer))
        for position, token in enumerate(own, start=first):
            token = token if job.sampling.logprobs is not None else token.with_top(len(recorded[position].top))
            if position not in other_draws and token != recorded[position]:
                size = _distance(recorded[position], token, job.sampling.logprobs)
                found.append(LogprobsDifference(position, size))
    return max(found, key=lambda each: np.inf if each.size is None else each.size, default=None)


def _distance(one: ShownToken, other: ShownToken, num_top: int | None) -> float | None:
    """Return the largest difference of two log-probabilities; a token that one lacks may just miss its last place."""
    if one.name != other.name:
        return None
    tops, others = dict(one.top), dict(other.top)
    least, other_least = (_least(each, num_top) for each in (one, other))
    sizes = [abs(tops.get(name, least) - others.get(name, other_least)) for name in {*tops, *others}]
    return max([abs(one.logprob - other.logprob), *sizes]) or None


def _least(token: ShownToken, num_top: int | None) -> float:
    """Return the log-probability in the last place; a completion's drawn token may stand behind it."""
    ranked = sorted((value for _, value in token.top), reverse=True)[:num_top]
    return ranked[-1] if ranked else token.logprob
