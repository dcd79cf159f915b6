"""A session whose GPU fails, for workers on Ray."""

from __future__ import annotations

import itertools

import torch

from swiftbatch.worker.config import EngineConfig
from swiftbatch.worker.sampling.draft_tree import Verification
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.session.session import WorkerSession

FAILING_STEP = 4


class BrokenGPUSession(WorkerSession):
    """The first worker's GPU fails in a step, behind the step's work."""

    def __init__(self, config: EngineConfig, run_uri: str, worker_id: str, metrics_host: str | None = None) -> None:
        super().__init__(config, run_uri, worker_id, metrics_host)
        step, numbers = self.engine.step, itertools.count(1)

        def failing() -> list[tuple[Sequence, Verification]]:
            found = step()
            if worker_id == "w1" and next(numbers) >= FAILING_STEP:
                raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered\nSee the manual")
            return found

        self.engine.step = failing  # type: ignore[method-assign]
