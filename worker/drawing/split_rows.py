"""Rows of several sequences in one tensor, which are asked for together as well as one sequence's after the other's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many
from itertools import accumulate
from typing import overload

import torch


class SplitRows(Many[torch.Tensor]):
    """The rows of each sequence, `[num_rows, width]`. A view takes longer than a number: none is made unasked."""

    def __init__(self, rows: torch.Tensor, sizes: Iterable[int]) -> None:
        """`rows [num_rows, width]` of all sequences in order, `sizes` many of each."""
        self._rows = rows
        self._starts = list(accumulate(sizes, initial=0))

    @property
    def together(self) -> torch.Tensor:
        """All rows, `[num_rows, width]`."""
        return self._rows[self._starts[0] : self._starts[-1]]

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> SplitRows: ...

    def __getitem__(self, index: int | slice) -> torch.Tensor | SplitRows:
        """The rows of one sequence, or of consecutive ones."""
        if isinstance(index, int):
            index = range(len(self))[index]
            return self._rows[self._starts[index] : self._starts[index + 1]]
        start, stop, step = index.indices(len(self))
        if step != 1:
            raise ValueError(f"found every {step}th sequence, expected consecutive ones")
        part = SplitRows(self._rows, ())
        part._starts = self._starts[start : max(start, stop) + 1]
        return part

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self[index] for index in range(len(self)))


def together(rows: Many[torch.Tensor]) -> torch.Tensor:
    """All rows of sequences side by side: where they lie so already, without a copy."""
    return rows.together if isinstance(rows, SplitRows) else torch.cat(list(rows))
