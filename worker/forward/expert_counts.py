"""Counts the distinct experts that rows of real steps meet, and corrects by them what probed rows took.

Rows that share a forward read each expert once, so a forward's time follows from how many distinct ones they meet.
Probes have rows that meet as many as rows may, and rows that all meet the same ones. What real rows meet lies between,
and where by far is learned as they pass: neighbours of a text often share experts, and rows of several texts do not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from swiftbatch.worker.kernels.kernel_sizes import TILE_ROWS

LEARNING_RATE = 0.05  # of a mean that has seen enough


class ExpertCounts:
    """The experts that so many rows of a forward met, in all layers together: running means by numbers of rows."""

    def __init__(self) -> None:
        self._newest = 0.0
        self.num_steps = 0  # that tell something
        self._means = np.zeros(TILE_ROWS + 1)
        self._numbers = np.zeros(TILE_ROWS + 1, dtype=int)

    def observe(self, num_rows: int, num_experts: float, num_forwards: int = 1) -> None:
        """Learn from forwards that met so many, on an average; those of more rows than are measured tell nothing."""
        self._newest = num_experts
        if num_rows <= TILE_ROWS:
            self._numbers[num_rows] += num_forwards
            rate = max(min(1.0, LEARNING_RATE * num_forwards), num_forwards / self._numbers[num_rows])
            self._means[num_rows] += rate * (num_experts - self._means[num_rows])
            self.num_steps += num_forwards

    def newest(self) -> float:
        """The experts that the newest forward met."""
        return self._newest

    def forget(self) -> None:
        """Forget all that was learned: what probes met is nobody's text."""
        self.num_steps = 0
        self._numbers[:] = 0
        self._means[:] = 0

    def seen(self) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of rows that forwards had, rising, and the experts that they met."""
        rows = np.flatnonzero(self._numbers)
        return rows, self._means[rows]


@dataclass(frozen=True)
class ExpertSpread:
    """Probes of rows that meet experts alike, and apart, for each of `row_counts`.

    `seconds` are those that rows apart take longer; the experts are counted as `ExpertCounts` counts them.
    """

    row_counts: tuple[int, ...]
    seconds: np.ndarray
    alike: np.ndarray
    apart: np.ndarray
    counts: ExpertCounts

    def saved_seconds(self) -> np.ndarray:
        """Seconds that real forwards of these numbers of rows take less than probed ones; more, where it is below 0.

        Numbers of rows that nobody had are as the nearest ones that somebody had, and without any as probed.
        """
        rows, met = self.counts.seen()
        alike, apart = (np.interp(rows, self.row_counts, each) for each in (self.alike, self.apart))
        tells = apart > alike
        if not tells.any():
            return np.zeros(len(self.row_counts))
        shares = ((met - alike)[tells]) / (apart - alike)[tells]
        saved: np.ndarray = self.seconds * (1 - np.interp(self.row_counts, rows[tells], shares))
        return saved


LOOKS_EVERY = 32  # forwards


class CudaExpertCounts(ExpertCounts):
    """`ExpertCounts` of what the kernels add up in `met [num_rows + 1, 2]`: layers of experts, and experts met there.

    All forwards count, those of prompts as well: on a GPU they share steps with the rows of drafts.
    """

    def __init__(self, met: torch.Tensor, num_layers: int) -> None:
        """Count forwards that have so many layers of experts."""
        super().__init__()
        self._met, self._num_layers = met, num_layers
        self._host = torch.zeros(met.shape, dtype=met.dtype, pin_memory=met.device.type == "cuda")
        self._known: NDArray[np.int64] = self._host.numpy().copy()
        self._num_forwards = self._newest_rows = 0
        self._is_coming = False
        self._arrival: torch.cuda.Event | None = None

    def look(self, num_rows: int) -> None:
        """Take note of a forward of so many rows that was queued, and now and then learn what those before it met."""
        self._num_forwards, self._newest_rows = self._num_forwards + 1, num_rows
        if self._is_coming and (self._arrival is None or self._arrival.query()):
            self._learn()
        if not self._is_coming and self._num_forwards % LOOKS_EVERY == 0:
            self._send()

    def newest(self) -> float:
        """Wait, and return the mean of the forwards since the last look that had as many rows as the newest one."""
        before = self._known
        self._wait()
        num_layers, num_met = (self._known - before)[self._newest_rows]
        return float(num_met * self._num_layers / max(1, num_layers))

    def forget(self) -> None:
        self._wait()
        super().forget()

    def _send(self) -> None:
        """Queue a copy."""
        self._host.copy_(self._met, non_blocking=True)
        if self._met.device.type == "cuda":
            self._arrival = torch.cuda.current_stream(self._met.device).record_event()
        self._is_coming = True

    def _wait(self) -> None:
        """Learn all that was counted until now."""
        self._send()
        if self._arrival is not None:
            self._arrival.synchronize()
        self._learn()

    def _learn(self) -> None:
        """Learn from what has come."""
        self._is_coming, found = False, self._host.numpy().copy()
        for num_rows, (num_layers, num_met) in enumerate(found - self._known):
            if num_rows and (num_forwards := num_layers // self._num_layers):
                self.observe(num_rows, num_met * self._num_layers / num_layers, num_forwards)
        self._known = found
