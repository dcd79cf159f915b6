"""Counts of distinct experts that rows use, to correct probed forward times.

A forward reads each expert once. Probes measure rows with all different and with equal experts; the rows of real steps
are between both.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from swiftbatch.worker.kernels.kernel_sizes import TILE_ROWS

LEARNING_RATE = 0.05  # rate of the running means


class ExpertCounts:
    """Running means of experts used by forwards, in all layers, by number of rows."""

    def __init__(self) -> None:
        self._newest = 0.0
        self.num_steps = 0  # number of observed forwards with up to `TILE_ROWS` rows
        self._means = np.zeros(TILE_ROWS + 1)
        self._numbers = np.zeros(TILE_ROWS + 1, dtype=int)

    def observe(self, num_rows: int, num_experts: float, num_forwards: int = 1) -> None:
        """Learn the mean count of `num_forwards` forwards. Forwards with more than `TILE_ROWS` rows are ignored."""
        self._newest = num_experts
        if num_rows <= TILE_ROWS:
            self._numbers[num_rows] += num_forwards
            rate = max(min(1.0, LEARNING_RATE * num_forwards), num_forwards / self._numbers[num_rows])
            self._means[num_rows] += rate * (num_experts - self._means[num_rows])
            self.num_steps += num_forwards

    def newest(self) -> float:
        return self._newest

    def forget(self) -> None:
        self.num_steps = 0
        self._numbers[:] = 0
        self._means[:] = 0

    def seen(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the observed row counts in ascending order, and the mean number of experts for each."""
        rows = np.flatnonzero(self._numbers)
        return rows, self._means[rows]


@dataclass(frozen=True)
class ExpertSpread:
    """Probes of rows with equal and with different experts, for each of `row_counts`.

    `seconds` is the extra time of different experts.
    """

    row_counts: tuple[int, ...]
    seconds: np.ndarray
    alike: np.ndarray
    apart: np.ndarray
    counts: ExpertCounts

    def saved_seconds(self) -> np.ndarray:
        """Return the seconds by which real forwards are faster than probed ones.

        A row count that was not observed uses the nearest observed ones.
        """
        rows, met = self.counts.seen()
        alike, apart = (np.interp(rows, self.row_counts, each) for each in (self.alike, self.apart))
        tells = apart > alike
        if not tells.any():
            return np.zeros(len(self.row_counts))
        shares = ((met - alike)[tells]) / (apart - alike)[tells]
        saved: np.ndarray = self.seconds * (1 - np.interp(self.row_counts, rows[tells], shares))
        return saved


LOOKS_EVERY = 32  # number of forwards


class CudaExpertCounts(ExpertCounts):
    """`ExpertCounts` from the kernels' `met [num_rows + 1, 2]`: layers, and distinct experts in them."""

    def __init__(self, met: torch.Tensor, num_layers: int) -> None:
        super().__init__()
        self._met, self._num_layers = met, num_layers
        self._host = torch.zeros(met.shape, dtype=met.dtype, pin_memory=met.device.type == "cuda")
        self._known: NDArray[np.int64] = self._host.numpy().copy()
        self._num_forwards = self._newest_rows = 0
        self._is_coming = False
        self._arrival: torch.cuda.Event | None = None

    def look(self, num_rows: int) -> None:
        """Register a queued forward, and every `LOOKS_EVERY` forwards learn from the earlier ones."""
        self._num_forwards, self._newest_rows = self._num_forwards + 1, num_rows
        if self._is_coming and (self._arrival is None or self._arrival.query()):
            self._learn()
        if not self._is_coming and self._num_forwards % LOOKS_EVERY == 0:
            self._send()

    def newest(self) -> float:
        """Wait, and return the mean number of experts in forwards with as many rows as the latest one."""
        before = self._known
        self._wait()
        num_layers, num_met = (self._known - before)[self._newest_rows]
        return float(num_met * self._num_layers / max(1, num_layers))

    def forget(self) -> None:
        self._wait()
        super().forget()

    def _send(self) -> None:
        self._host.copy_(self._met, non_blocking=True)
        if self._met.device.type == "cuda":
            self._arrival = torch.cuda.current_stream(self._met.device).record_event()
        self._is_coming = True

    def _wait(self) -> None:
        self._send()
        if self._arrival is not None:
            self._arrival.synchronize()
        self._learn()

    def _learn(self) -> None:
        self._is_coming, found = False, self._host.numpy().copy()
        for num_rows, (num_layers, num_met) in enumerate(found - self._known):
            if num_rows and (num_forwards := num_layers // self._num_layers):
                self.observe(num_rows, num_met * self._num_layers / num_layers, num_forwards)
        self._known = found
