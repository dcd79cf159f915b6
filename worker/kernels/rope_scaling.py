"""Frequencies of rotary positions, without torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST = float(np.finfo(np.float32).max)
SOME_TURN = "proportional"  # type of angles of which the last are 0
ROPE_NUMBERS = {  # supported types, and their parameters in `rope_parameters`
    "default": ("rope_theta",),
    "linear": ("rope_theta", "factor"),
    "llama3": ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("rope_theta", "factor", "original_max_position_embeddings"),
    "longrope": ("rope_theta", "factor", "original_max_position_embeddings"),
    SOME_TURN: ("rope_theta", "partial_rotary_factor"),
}
OPTIONS = {
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("short_factor", "long_factor", "attention_factor"),
}


@dataclass(frozen=True)
class QueryGrowth:
    """Growth of queries with their positions: factors 1 + `beta` log(1 + position // `length`)."""

    beta: float
    length: int

    def scales(self, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        return (1 + self.beta * np.log1p(positions // self.length)).astype(np.float32)


@dataclass(frozen=True)
class Rotary:
    """Rotation of pairs of dimensions: `frequencies [head_dim / 2]` in radians, `scaling` of cosines and sines.

    `numerics` names frequencies whose last bit differs from earlier versions. Jobs of more than `short_length`
    positions use `long_frequencies`. If `is_rounded`, cosines and sines have the model's dtype.
    """

    frequencies: NDArray[np.float32]
    scaling: float = 1.0
    numerics: str = ""
    num_nope_pairs: int = 0  # the last pairs are neither rotated nor scaled
    long_frequencies: NDArray[np.float32] | None = None
    short_length: int | None = None
    is_rounded: bool = True
    growth: QueryGrowth | None = None  # multiplies rotated queries

    def beside_still(self, num_pairs: int) -> Rotary:
        """Return the same rotation, extended to `num_pairs` pairs by pairs that are not rotated."""
        num_nope_pairs = num_pairs - len(self.frequencies)
        short, long = (
            None if own is None else np.pad(own, (0, num_nope_pairs))
            for own in (self.frequencies, self.long_frequencies)
        )
        assert short is not None
        return replace(self, frequencies=short, long_frequencies=long, num_nope_pairs=num_nope_pairs)

    def num_rows(self, num_positions: int) -> int:
        """Return the number of table rows that a job needs. Rows for long jobs follow all rows for short jobs."""
        if self.short_length is None or num_positions <= self.short_length:
            return num_positions
        return self.short_length + num_positions

    def turns(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the angles of pairs in table rows, `[num_rows, head_dim / 2]`, multiplied in float32."""
        if self.short_length is None or self.long_frequencies is None:
            return rows.astype(np.float32)[:, None] * self.frequencies
        is_long = rows >= self.short_length
        positions = np.where(is_long, rows - self.short_length, rows).astype(np.float32)
        return positions[:, None] * np.where(is_long[:, None], self.long_frequencies, self.frequencies)

    def scales(self) -> NDArray[np.float32]:
        """Return the factor of each pair's cosine and sine, `[head_dim / 2]`."""
        scales = np.full(len(self.frequencies), self.scaling, dtype=np.float32)
        scales[len(scales) - self.num_nope_pairs :] = 1.0
        return scales


def other_rotary(layers: Iterable[Any]) -> Rotary | None:
    """Return the rotation of layers whose rotation is not the model's.

    Raises ValueError if these layers have several.
    """
    found = {id(layer.rotary): layer.rotary for layer in layers if layer.rotary is not None}
    if len(found) > 1:
        raise ValueError(f"found layers with {len(found)} rotations of their own, expected one at most")
    return next(iter(found.values()), None)


def default_frequencies(theta: float, head_dim: int) -> NDArray[np.float32]:
    """Return plain rotary frequencies (Su et al. 2021), rounded to float32 where `transformers` rounds."""
    return np.float32(1.0) / _wavelengths(theta, head_dim)


def stretched_frequencies(theta: float, head_dim: int, factors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return LongRoPE's frequencies (Ding et al. 2024), each with its own factor."""
    if factors.shape != (head_dim // 2,):
        raise ValueError(f"found {len(factors)} factors of its frequencies, expected {head_dim // 2}")
    return np.float32(1.0) / (factors * _wavelengths(theta, head_dim))


def _wavelengths(theta: float, head_dim: int) -> NDArray[np.float32]:
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.power(theta, exponents.astype(np.float64)).astype(np.float32)


def llama3_frequencies(
    theta: float, head_dim: int, factor: float, low: float, high: float, original: float
) -> NDArray[np.float32]:
    """Return Llama 3.1's frequencies, rounded to float32 where `transformers` rounds.

    Frequencies with fewer than `low` turns in `original` positions are divided by `factor`. Those with more than `high`
    turns stay the same, and frequencies between are interpolated.
    """
    plain = default_frequencies(theta, head_dim)
    wavelengths = np.float32(2 * math.pi) * (np.float32(1.0) / plain)
    stretched = plain / np.float32(factor)
    turns = np.float32(original) * (np.float32(1.0) / wavelengths)
    share = (turns - np.float32(low)) / np.float32(high - low)
    blended = (np.float32(1.0) - share) * plain / np.float32(factor) + share * plain
    is_long, is_short = wavelengths > np.float32(original / low), wavelengths < np.float32(original / high)
    return np.where(is_long, stretched, np.where(is_short, plain, blended))


def yarn_frequencies(
    theta: float, head_dim: int, factor: float, original: float, fast: float, slow: float, is_whole: bool = True
) -> NDArray[np.float32]:
    """Return YaRN's frequencies (Peng et al. 2023), rounded to float32 where `transformers` rounds.

    Dimensions with more than `fast` turns in `original` positions stay the same. Those with fewer than `slow` turns are
    divided by `factor`. If `is_whole`, the ramp between both starts and ends at whole dimensions.
    """

    def dimension(num_turns: float) -> float:
        return head_dim * math.log(original / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(fast), dimension(slow)
    if is_whole:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(width)).clip(0, 1)
    wavelengths = _wavelengths(theta, head_dim)
    kept, one = np.float32(1.0) - ramp, np.float32(1.0)
    stretched = one / (np.float32(factor) * wavelengths)
    found: NDArray[np.float32] = stretched * (one - kept) + one / wavelengths * kept
    return found


def rotary_of(parameters: Mapping[str, Any], head_dim: int, is_strict: bool = False) -> Rotary:
    """Return the rotation that a config's `rope_parameters` describe.

    Raises KeyError, TypeError or ValueError for unsupported types and parameters and, if `is_strict`, also for
    additional parameters.
    """
    said = dict(parameters)
    kind = said.pop("rope_type", None) or said["type"]
    if said.pop("type", kind) != kind:
        raise ValueError("found two types")
    if is_strict and not set(said) <= {*ROPE_NUMBERS[kind], *OPTIONS.get(kind, ())}:
        raise ValueError("other angles")
    theta, *others = (_positive(said[name]) for name in ROPE_NUMBERS[kind])
    if kind in OPTIONS:
        factor, original = others
        make = _yarn if kind == "yarn" else _longrope
        return make(theta, head_dim, factor, original, {name: said.get(name) for name in OPTIONS[kind]})
    if kind == SOME_TURN:
        num_turned = int(others[0] * head_dim // 2)
        return Rotary(default_frequencies(theta, head_dim)[:num_turned]).beside_still(head_dim // 2)
    if kind == "linear":
        return Rotary(default_frequencies(theta, head_dim) / np.float32(others[0]), numerics="linear angles")
    if not others:
        return Rotary(default_frequencies(theta, head_dim))
    factor, low, high, original = others
    if low >= high:
        raise ValueError(f"found low_freq_factor {low:g}, expected less than high_freq_factor, {high:g}")
    return Rotary(llama3_frequencies(theta, head_dim, factor, low, high, original))


def _yarn(theta: float, head_dim: int, factor: float, original: float, options: Mapping[str, Any]) -> Rotary:
    if options["truncate"] not in (None, True, False):
        raise ValueError(f"found truncate {options['truncate']!r}, expected true or false")
    fast, slow = (_positive(options[name] or default) for name, default in (("beta_fast", 32), ("beta_slow", 1)))
    is_whole = options["truncate"] is not False
    frequencies = yarn_frequencies(theta, head_dim, factor, original, fast, slow, is_whole)
    return Rotary(frequencies, _attention_factor(factor, options), numerics="yarn angles")


def _longrope(theta: float, head_dim: int, factor: float, original: float, options: Mapping[str, Any]) -> Rotary:
    if not original.is_integer() or original < 2:
        raise ValueError(f"found original_max_position_embeddings {original:g}, expected a whole number above 1")
    short, long = (
        stretched_frequencies(theta, head_dim, _factors(name, options[name]))
        for name in ("short_factor", "long_factor")
    )
    scaling = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    if (said := options["attention_factor"]) is not None:
        scaling = _positive(said)
    return Rotary(short, scaling, long_frequencies=long, short_length=int(original))


def _attention_factor(factor: float, options: Mapping[str, Any]) -> float:
    """Return the factor of YaRN's cosines and sines."""
    if (said := options["attention_factor"]) is not None:
        return _positive(said)

    def scale(by: float) -> float:
        return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0

    if (one := options["mscale"]) and (other := options["mscale_all_dim"]):
        return scale(_positive(one)) / scale(_positive(other))
    return scale(1.0)


def _factors(name: str, numbers: Any) -> NDArray[np.float32]:
    if not isinstance(numbers, list):
        raise ValueError(f"found {name} {numbers!r}, expected a list of numbers")
    return np.array([_positive(each) for each in numbers], dtype=np.float32)


def _positive(number: Any) -> float:
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number <= MOST:
        raise ValueError(f"found {number!r}, expected a number above 0 that a float32 holds")
    return float(number)
