"""The engine as benchmarks run it: a sequence that can't go on ends the benchmark."""

from __future__ import annotations

from jobs.errors import UserError
from worker.engine import Engine
from worker.sequence import Sequence
from worker.verification import Verification


class BenchError(UserError):
    """A benchmark that cannot be run as asked."""


class BenchEngine(Engine):
    """Has no use for sequences that failed."""

    def step(self) -> list[tuple[Sequence, Verification]]:
        """As `Engine.step`. Raises BenchError where a sequence can't go on."""
        results = super().step()
        for sequence in self.sequences:
            if sequence.error is not None:
                raise BenchError(sequence.error)
        return results
