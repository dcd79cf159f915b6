"""Rotary angles by position: cosines and sines in float64, so that all processors round them alike."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from swiftbatch.worker.kernels.rope_scaling import QueryGrowth, Rotary

ROWS_AT_ONCE = 4096
SLACK = 16  # number of floats that the kernels read beyond the last row


def angles(rotary: Rotary, rows: NDArray[np.int64], dtype: torch.dtype) -> torch.Tensor:
    """Return cosines of the first half of a head's dimensions, then sines: `[num_rows, head_dim] float32`."""
    turned = rotary.turns(rows).astype(np.float64)
    both = np.concatenate((np.cos(turned), np.sin(turned)), axis=1).astype(np.float32)
    return torch.from_numpy(both * np.tile(rotary.scales(), 2)).to(kept_as(rotary, dtype)).float()


def kept_as(rotary: Rotary, dtype: torch.dtype) -> torch.dtype:
    return dtype if rotary.is_rounded else torch.float32


def query_scales(growth: QueryGrowth, positions: NDArray[np.int64], dtype: torch.dtype) -> torch.Tensor:
    """Return factors of queries, `[num_positions] float32`."""
    return torch.from_numpy(growth.scales(positions)).to(dtype).float()


class QueryScaleTable:
    """`query_scales` of positions from 0 on."""

    def __init__(self, growth: QueryGrowth, dtype: torch.dtype) -> None:
        self._growth, self._dtype = growth, dtype
        self._table = torch.zeros(0)

    def address(self, last_position: int) -> int:
        """Return the address, valid until a call for a later position."""
        if last_position >= len(self._table):
            num_positions = ROWS_AT_ONCE + max(last_position, 2 * len(self._table))
            self._table = query_scales(self._growth, np.arange(num_positions), self._dtype)
        return self._table.data_ptr()


class AngleTable:
    """Table `[num_rows, head_dim]` float32: cosines of the first half of a head's dimensions, then sines."""

    def __init__(self, rotary: Rotary, dtype: torch.dtype) -> None:
        self._rotary = rotary
        self._dtype = dtype
        self._head_dim = 2 * len(rotary.frequencies)
        self._table = torch.zeros(0, self._head_dim)

    def address(self, last_row: int) -> int:
        """Return the address of a table up to this row, valid until a call for a later row."""
        if last_row >= len(self._table):
            num_blocks = -(-max(last_row + 1, 2 * len(self._table)) // ROWS_AT_ONCE)
            grown = torch.zeros(num_blocks * ROWS_AT_ONCE * self._head_dim + SLACK)
            table = grown[:-SLACK].view(-1, self._head_dim)
            table[: len(self._table)] = self._table
            table[len(self._table) :] = angles(self._rotary, np.arange(len(self._table), len(table)), self._dtype)
            self._table = table
        return self._table.data_ptr()
