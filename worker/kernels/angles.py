"""Rotary angles by position: cosines and sines of float64, so that no processor rounds them otherwise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

POSITIONS_AT_ONCE = 4096
SLACK = 16  # floats that the kernels read beyond the last position
MOST = float(np.finfo(np.float32).max)
ROPE_NUMBERS = {  # what `rope_parameters` hold beside `rope_type`, for those types whose angles are computed here
    "default": ("rope_theta",),
    "llama3": ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True)
class Rotary:
    """The rotation of pairs of dimensions: `frequencies [head_dim / 2]` in radians, `scaling` of both tables."""

    frequencies: NDArray[np.float32]
    scaling: float = 1.0


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


def frequencies_of(parameters: Mapping[str, Any], head_dim: int) -> NDArray[np.float32]:
    """Return the frequencies that a config's `rope_parameters` describe.

    Only the types in `ROPE_NUMBERS` are known, and all of a type's numbers must be there and make sense. Raises
    KeyError, TypeError or ValueError for any others.
    """
    names = ROPE_NUMBERS[parameters["rope_type"]]
    theta, *others = (_positive(parameters[name]) for name in names)
    if not others:
        return default_frequencies(theta, head_dim)
    factor, low, high, original = others
    if low >= high:
        raise ValueError(f"found low_freq_factor {low:g}, expected less than high_freq_factor, {high:g}")
    return llama3_frequencies(theta, head_dim, factor, low, high, original)


def _positive(number: Any) -> float:
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number <= MOST:
        raise ValueError(f"found {number!r}, expected a number above 0 that a float32 holds")
    return float(number)


def angles(rotary: Rotary, positions: NDArray[np.int64], dtype: torch.dtype) -> torch.Tensor:
    """Cosines of the first half of a head's dimensions, then sines: `[num_positions, head_dim] float32`.

    They are rounded to the dtype of the model.
    """
    turned = positions.astype(np.float32)[:, None] * rotary.frequencies  # in float32, as in transformers
    both = np.concatenate((np.cos(turned.astype(np.float64)), np.sin(turned.astype(np.float64))), axis=1)
    return torch.from_numpy(both.astype(np.float32) * np.float32(rotary.scaling)).to(dtype).float()


class AngleTable:
    """`[num_positions, head_dim]` float32: cosines of the first half of a head's dimensions, then sines."""

    def __init__(self, rotary: Rotary, dtype: torch.dtype) -> None:
        """Angles of a model of this dtype, to which they are rounded."""
        self._rotary = rotary
        self._dtype = dtype
        self._head_dim = 2 * len(rotary.frequencies)
        self._table = torch.zeros(0, self._head_dim)

    def address(self, last_position: int) -> int:
        """Return the address of a table that reaches up to this position; it holds until a call that asks for more."""
        if last_position >= len(self._table):
            num_blocks = -(-max(last_position + 1, 2 * len(self._table)) // POSITIONS_AT_ONCE)
            grown = torch.zeros(num_blocks * POSITIONS_AT_ONCE * self._head_dim + SLACK)
            table = grown[:-SLACK].view(-1, self._head_dim)
            table[: len(self._table)] = self._table
            table[len(self._table) :] = angles(self._rotary, np.arange(len(self._table), len(table)), self._dtype)
            self._table = table
        return self._table.data_ptr()
