"""The findings of a chaos run, for people and as JSON."""

from __future__ import annotations

from pydantic import computed_field

from swiftbatch.jobs.frozen import Frozen
from swiftbatch.scheduler.chaos.comparison import JobComparison
from swiftbatch.scheduler.chaos.disturbed_run import Kill
from swiftbatch.scheduler.chaos.plan import KINDS
from swiftbatch.scheduler.display.summary import duration


class ChaosReport(Frozen):
    """The findings; times in seconds."""

    seed: int
    jobs: tuple[JobComparison, ...]
    num_tokens: int  # generated tokens in the output
    num_planned_kills: int
    kills: tuple[Kill, ...]
    num_recomputed_tokens: int
    tokens_per_checkpoint: int  # of the whole run, between two checkpoints
    resumes: dict[str, int]  # by kind
    undisturbed_seconds: float
    disturbed_seconds: float

    @computed_field  # type: ignore[prop-decorator]
    @property
    def is_identical(self) -> bool:
        """True if every job has exactly one output, the same as in the undisturbed run."""
        return all(job.is_identical for job in self.jobs)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def missing(self) -> list[str]:
        return [job.custom_id for job in self.jobs if job.disturbed_sha256 is None]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def duplicates(self) -> list[str]:
        return [job.custom_id for job in self.jobs if job.num_lines > 1]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def kills_by_kind(self) -> dict[str, int]:
        return {kind: sum(kill.kind == kind for kill in self.kills) for kind in KINDS}

    @computed_field  # type: ignore[prop-decorator]
    @property
    def max_recomputed_tokens(self) -> int:
        """The number of tokens that may be lost: at each kill, all that the run generates between two checkpoints."""
        return len(self.kills) * self.tokens_per_checkpoint

    @computed_field  # type: ignore[prop-decorator]
    @property
    def seconds_lost(self) -> float:
        return round(self.disturbed_seconds - self.undisturbed_seconds, 1)

    @property
    def has_passed(self) -> bool:
        """True if all kills were done and changed no output."""
        return self.is_identical and len(self.kills) == self.num_planned_kills

    def lines(self) -> list[str]:
        num_identical = sum(job.is_identical for job in self.jobs)
        by_kind = ", ".join(f"{count} {kind}" for kind, count in self.kills_by_kind.items() if count) or "none"
        resumes = ", ".join(f"{count} {kind}" for kind, count in sorted(self.resumes.items())) or "none"
        return [
            f"outputs identical: {'yes' if self.is_identical else 'NO'} (SHA-256 of {num_identical} of "
            f"{len(self.jobs)} jobs; {len(self.missing)} missing, {len(self.duplicates)} duplicate)",
            f"kills survived: {len(self.kills)} of {self.num_planned_kills} ({by_kind})",
            f"tokens computed again: {self.num_recomputed_tokens:,} of {self.num_tokens:,}, at most "
            f"{self.max_recomputed_tokens:,} ({len(self.kills)} kills x {self.tokens_per_checkpoint:,} tokens "
            "of the whole run from checkpoint to checkpoint)",
            f"resumes: {resumes}",
            f"time: {duration(self.undisturbed_seconds)} undisturbed, {duration(self.disturbed_seconds)} disturbed, "
            f"{self.seconds_lost:,.1f} s lost",
        ]
