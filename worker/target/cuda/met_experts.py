"""Counts of the experts that rows meet on a GPU: its kernels count them, and the host looks seldom, without a wait."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from swiftbatch.worker.target.expert_counts import ExpertCounts

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
        """As `ExpertCounts.newest`, by a wait; a mean of the forwards since the last look that had as many rows."""
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
