"""Compares a result's log-probabilities with those of the model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from swiftbatch.jobs.job import Job
from swiftbatch.jobs.logprobs import (
    PromptLogprobs,
    ShownToken,
    TokenLogprobs,
    TokenTexts,
    parts_of_echo,
    shown_logprobs,
    shown_prompt_logprobs,
    shown_prompt_tokens,
    shown_tokens,
)
from swiftbatch.jobs.sampling_params import ALONE

Shown = dict[str, Any]
FORM_ERRORS = (AttributeError, IndexError, KeyError, TypeError, ValueError)


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
    prompt: tuple[int, str] | None,
) -> LogprobsDifference | None:
    """Compare parts of an output's log-probabilities, each with its first position; return None if they are equal.

    `other_draws` are positions at which the model draws another token. `prompt` is the number of tokens and the text
    of a prompt that stands before the output. A job that asked for none may show any number of the likeliest tokens.
    """
    if job.sampling.echo == ALONE:
        token_ids, computed = token_ids[:0], ()
    try:
        own = shown if prompt is None else parts_of_echo(shown, prompt[0], len(prompt[1]))[1]
        recorded = shown_tokens(job, own)
        fits = job.messages is not None or own["text_offset"] == tokenizer.text_offsets(token_ids.tolist())
    except FORM_ERRORS:
        return LogprobsDifference()
    if len(recorded) != len(token_ids) or not fits:
        return LogprobsDifference()
    found: list[LogprobsDifference] = []
    for first, logprobs in computed:
        part = token_ids[first : first + len(logprobs)]
        tokens = shown_tokens(job, shown_logprobs(job, part, logprobs, tokenizer))
        differences = _differences(recorded[first:], tokens, job.sampling.logprobs, first)
        found += [each for each in differences if each.position not in other_draws]
    return _largest(found)


def prompt_difference(
    job: Job, shown: Shown, prompt: PromptLogprobs, echo: str, tokenizer: TokenTexts
) -> LogprobsDifference | None:
    """Compare the log-probabilities of a prompt in both forms that a body and its choice show, as `largest_difference`.

    A position counts the prompt's tokens from 0.
    """
    try:
        found = [*_in_echo(job, shown.get("logprobs"), prompt, echo, tokenizer)]
        found += _in_vllm_form(job, shown.get("prompt_logprobs"), prompt, tokenizer)
    except FORM_ERRORS:
        return LogprobsDifference()
    return _largest(found)


def _in_echo(
    job: Job, shown: Any, prompt: PromptLogprobs, echo: str, tokenizer: TokenTexts
) -> list[LogprobsDifference]:
    if not job.sampling.echo or shown is None:
        return []  # the output's comparison reports missing ones
    num_top = job.sampling.logprobs
    none = TokenLogprobs.empty(0, prompt.logprobs.num_top if num_top is None else num_top)
    expected = shown_logprobs(job, np.empty(0, np.uint32), none, tokenizer, prompt, echo)
    its = parts_of_echo(shown, len(prompt.token_ids), len(echo))[0]
    first, its_first = ({name: values[:1] for name, values in each.items()} for each in (expected, its))
    if first != its_first or its["text_offset"] != expected["text_offset"]:
        return [LogprobsDifference()]
    recorded, tokens = (
        shown_tokens(job, {name: values[1:] for name, values in each.items()}) for each in (its, expected)
    )
    return _differences(recorded, tokens, num_top, 1)


def _in_vllm_form(job: Job, shown: Any, prompt: PromptLogprobs, tokenizer: TokenTexts) -> list[LogprobsDifference]:
    num_top = job.sampling.prompt_logprobs
    expected = None if num_top is None else shown_prompt_logprobs(prompt, num_top, tokenizer)
    if expected == shown:
        return []
    if expected is None or len(expected) != len(shown) or shown[0] is not None:
        return [LogprobsDifference()]
    recorded, tokens = shown_prompt_tokens(shown), shown_prompt_tokens(expected)
    return _differences(recorded, tokens, num_top, 1) or [LogprobsDifference()]  # or a rank or a text was changed


def _differences(
    recorded: Sequence[ShownToken], tokens: Sequence[ShownToken], num_top: int | None, first: int
) -> list[LogprobsDifference]:
    """Compare tokens with their records, which begin at position `first`."""
    found = []
    for position, (its, token) in enumerate(zip(recorded, tokens, strict=False), start=first):
        own = token if num_top is not None else token.with_top(len(its.top))
        if own != its:
            found.append(LogprobsDifference(position, _distance(its, own, num_top)))
    return found


def _largest(found: Iterable[LogprobsDifference]) -> LogprobsDifference | None:
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
