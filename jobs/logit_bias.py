"""`logit_bias`: what is added to the logits of some tokens, as a job file writes it and as it is kept."""

from __future__ import annotations

import re
from collections.abc import Mapping

from swiftbatch.jobs.input.reasons import FieldError, shown

MAX_BIASED = 10_000  # tokens
MAX_BIAS = 100.0
TOKEN = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)

LogitBias = tuple[tuple[int, float], ...]
"""Token ids, ascending, each with the number that is added to its logit."""


def bias_pairs(value: object) -> object:
    """The pairs of an object whose names are token ids, written as strings or whole numbers.

    Raises FieldError for anything that is no token id or no bias, with a text for the user. Pairs come out as they are.
    """
    if isinstance(value, tuple):
        return value
    if not isinstance(value, Mapping):
        expected = 'an object of token ids and numbers, such as {"50256": -100}'
        raise FieldError("", f"found {shown(value)}, expected {expected}")
    if len(value) > MAX_BIASED:
        raise FieldError("", f"found {len(value)} tokens, expected at most {MAX_BIASED}")
    pairs = {_token_id(name): _bias(name, bias) for name, bias in value.items()}
    return tuple(sorted(pairs.items()))


def bias_object(pairs: LogitBias) -> dict[str, float]:
    """The object that a job file would have."""
    return {str(token_id): bias for token_id, bias in pairs}


def _token_id(name: object) -> int:
    if isinstance(name, str) and TOKEN.fullmatch(name):
        return int(name)
    if isinstance(name, int) and not isinstance(name, bool) and name >= 0:
        return name
    raise FieldError("", f'found {shown(name)} as a token, expected its number, such as "50256"')


def _bias(name: object, bias: object) -> float:
    if isinstance(bias, int | float) and not isinstance(bias, bool) and -MAX_BIAS <= bias <= MAX_BIAS:
        return float(bias)
    expected = f"a number from {-MAX_BIAS:g} to {MAX_BIAS:g}"
    raise FieldError(str(name), f"found {shown(bias)}, expected {expected}")
