"""The jobs of a worker between two reports, and how full its steps are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from swiftbatch.metrics.worker_counters import EngineCounters
from swiftbatch.worker.session.work import JobProgress, WorkReport


@dataclass
class WorkSlice:
    """Collects what a report tells beside the jobs that run on; fields as in `WorkReport`."""

    failed: list[tuple[str, str]] = field(default_factory=list)
    refused: list[tuple[str, str, str]] = field(default_factory=list)
    released: list[JobProgress] = field(default_factory=list)
    outgrown: list[JobProgress] = field(default_factory=list)
    ended: list[JobProgress] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    unbegun: list[str] = field(default_factory=list)
    num_steps: int = 0
    num_job_steps: int = 0  # a step of five jobs counts five
    most_jobs: int = 0  # in a step

    def count_step(self, num_jobs: int) -> None:
        """Count a step of so many jobs."""
        self.num_steps += 1
        self.num_job_steps += num_jobs
        self.most_jobs = max(self.most_jobs, num_jobs)

    def has_many_empty(self, num_jobs: int) -> bool:
        """Tell whether so few jobs are left that the worker had better ask for others than go on with them."""
        return 2 * num_jobs <= self.most_jobs

    def report(
        self,
        progress: Iterable[JobProgress],
        finished: Iterable[JobProgress],
        num_generated_tokens: int,
        *,
        is_draining: bool,
        counters: EngineCounters | None,
    ) -> WorkReport:
        """The report of the slice, once it is over."""
        return WorkReport(
            progress=tuple(progress),
            finished=tuple(finished),
            failed=tuple(self.failed),
            num_generated_tokens=num_generated_tokens,
            released=tuple(self.released),
            is_draining=is_draining,
            counters=counters,
            refused=tuple(self.refused),
            outgrown=tuple(self.outgrown),
            ended=tuple(self.ended),
            begun=tuple(self.begun),
            unbegun=tuple(self.unbegun),
            num_jobs=self.num_job_steps / max(1, self.num_steps),
        )
