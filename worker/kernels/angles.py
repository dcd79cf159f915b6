"""Rotary angles by position: cosines and sines of float64, so that no processor rounds them otherwise."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from swiftbatch.worker.kernels.frequencies import Rotary

POSITIONS_AT_ONCE = 4096
SLACK = 16  # floats that the kernels read beyond the last position


def angles(rotary: Rotary, positions: NDArray[np.int64], dtype: torch.dtype) -> torch.Tensor:
    """Cosines of the first half of a head's dimensions, then sines: `[num_positions, head_dim] float32`.

    They are rounded to the dtype of the model, where its rotation is.
    """
    turned = positions.astype(np.float32)[:, None] * rotary.frequencies  # in float32, as in transformers
    both = np.concatenate((np.cos(turned.astype(np.float64)), np.sin(turned.astype(np.float64))), axis=1)
    return torch.from_numpy(both.astype(np.float32) * np.float32(rotary.scaling)).to(kept_as(rotary, dtype)).float()


def kept_as(rotary: Rotary, dtype: torch.dtype) -> torch.dtype:
    """The dtype that holds the angles of a model of this dtype."""
    return dtype if rotary.is_rounded else torch.float32


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
