"""Frequencies of rotary positions: which dimension turns how far from one position to the next. Without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST = float(np.finfo(np.float32).max)
ROPE_NUMBERS = {  # what `rope_parameters` hold beside `rope_type`, for those types whose angles are computed here
    "default": ("rope_theta",),
    "linear": ("rope_theta", "factor"),
    "llama3": ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("rope_theta", "factor", "original_max_position_embeddings"),
}
OPTIONS = {"yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")}


@dataclass(frozen=True)
class Rotary:
    """The rotation of pairs of dimensions: `frequencies [head_dim / 2]` in radians, `scaling` of both tables.

    `numerics` names frequencies that differ from those of earlier versions in their last bit. Cosines and sines are
    rounded to the model's dtype, or stay float32.
    """

    frequencies: NDArray[np.float32]
    scaling: float = 1.0
    numerics: str = ""
    is_rounded: bool = True


def default_frequencies(theta: float, head_dim: int) -> NDArray[np.float32]:
    """Frequencies of plain rotary positions (Su et al. 2021), rounded to float32 where `transformers` rounds."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.float32(1.0) / np.power(theta, exponents.astype(np.float64)).astype(np.float32)


def llama3_frequencies(
    theta: float, head_dim: int, factor: float, low: float, high: float, original: float
) -> NDArray[np.float32]:
    """Frequencies of Llama 3.1 and later, rounded to float32 where `transformers` rounds.

    Frequencies that turn less than `low` times within `original` positions are divided by `factor`. Those that turn
    more than `high` times stay, and between these they are blended. Each operation is one that IEEE 754 rounds in one
    way.
    """
    plain = default_frequencies(theta, head_dim)
    wavelengths = np.float32(2 * math.pi) * (np.float32(1.0) / plain)
    stretched = plain / np.float32(factor)
    turns = np.float32(original) * (np.float32(1.0) / wavelengths)
    share = (turns - np.float32(low)) / np.float32(high - low)  # the share of the plain frequency
    blended = (np.float32(1.0) - share) * plain / np.float32(factor) + share * plain
    is_long, is_short = wavelengths > np.float32(original / low), wavelengths < np.float32(original / high)
    return np.where(is_long, stretched, np.where(is_short, plain, blended))


def yarn_frequencies(
    theta: float, head_dim: int, factor: float, original: float, fast: float, slow: float
) -> NDArray[np.float32]:
    """Frequencies of YaRN (Peng et al. 2023), rounded to float32 where `transformers` rounds.

    Dimensions that turn more than `fast` times within `original` positions keep their frequency, those that turn less
    than `slow` times have it divided by `factor`, and between these there is a ramp over the dimensions.
    """

    def dimension(num_turns: float) -> float:
        return head_dim * math.log(original / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(dimension(fast)), 0), min(math.ceil(dimension(slow)), head_dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(width)).clip(0, 1)
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    wavelengths = np.power(theta, exponents.astype(np.float64)).astype(np.float32)
    kept, one = np.float32(1.0) - ramp, np.float32(1.0)
    stretched = one / (np.float32(factor) * wavelengths)
    found: NDArray[np.float32] = stretched * (one - kept) + one / wavelengths * kept
    return found


def rotary_of(parameters: Mapping[str, Any], head_dim: int, is_strict: bool = False) -> Rotary:
    """Return the rotation that a config's `rope_parameters` describe.

    Only the types in `ROPE_NUMBERS` are known, and all of a type's numbers must be there and make sense; no others,
    if it `is_strict`. Raises KeyError, TypeError or ValueError for any others.
    """
    said = dict(parameters)
    kind = said.pop("rope_type", None) or said["type"]
    if said.pop("type", kind) != kind:
        raise ValueError("found two types")
    if is_strict and not set(said) <= {*ROPE_NUMBERS[kind], *OPTIONS.get(kind, ())}:
        raise ValueError("other angles")
    theta, *others = (_positive(said[name]) for name in ROPE_NUMBERS[kind])
    if kind == "yarn":
        factor, original = others
        return _yarn(theta, head_dim, factor, original, {name: said.get(name) for name in OPTIONS["yarn"]})
    if kind == "linear":
        return Rotary(default_frequencies(theta, head_dim) / np.float32(others[0]), numerics="linear angles")
    if not others:
        return Rotary(default_frequencies(theta, head_dim))
    factor, low, high, original = others
    if low >= high:
        raise ValueError(f"found low_freq_factor {low:g}, expected less than high_freq_factor, {high:g}")
    return Rotary(llama3_frequencies(theta, head_dim, factor, low, high, original))


def _yarn(theta: float, head_dim: int, factor: float, original: float, options: Mapping[str, Any]) -> Rotary:
    """Raises ValueError for the forms that only `transformers` takes."""
    if options["truncate"] not in (None, True):
        raise ValueError("found a ramp that begins between two dimensions")
    fast, slow = (_positive(options[name] or default) for name, default in (("beta_fast", 32), ("beta_slow", 1)))
    frequencies = yarn_frequencies(theta, head_dim, factor, original, fast, slow)
    return Rotary(frequencies, _attention_factor(factor, options), numerics="yarn angles")


def _attention_factor(factor: float, options: Mapping[str, Any]) -> float:
    """The scaling of YaRN's cosines and sines: as given, or by the factor and what both of its scales make of it."""
    if (said := options["attention_factor"]) is not None:
        return _positive(said)

    def scale(by: float) -> float:
        return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0

    if (one := options["mscale"]) and (other := options["mscale_all_dim"]):
        return scale(_positive(one)) / scale(_positive(other))
    return scale(1.0)


def _positive(number: Any) -> float:
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number <= MOST:
        raise ValueError(f"found {number!r}, expected a number above 0 that a float32 holds")
    return float(number)
