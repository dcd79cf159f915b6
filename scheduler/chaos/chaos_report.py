"""The findings of a chaos run, for people and as JSON: every job's output, compared token for token, and the losses."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from pydantic import computed_field

from swiftbatch.jobs.frozen_records import Frozen
from swiftbatch.jobs.run.run import Run
from swiftbatch.scheduler.chaos.chaos_options import ChaosError
from swiftbatch.scheduler.chaos.disturbed_run import Kill
from swiftbatch.scheduler.chaos.kills import KINDS
from swiftbatch.scheduler.display.progress_line import duration


class JobComparison(Frozen):
    """One job's SHA-256 over its generated tokens, undisturbed and disturbed; None where it has no output."""

    custom_id: str
    undisturbed_sha256: str | None
    disturbed_sha256: str | None
    num_lines: int  # of the job in the disturbed run's output: 1
    is_identical: bool  # tokens, text, finish reason and usage


class RunOutput:
    """The lines of a run's `output.jsonl`."""

    def __init__(self, run: Run) -> None:
        """Raises ChaosError if the run has no output."""
        data = run.store.read("output.jsonl")
        if data is None:
            raise ChaosError(f"{run.store.shown_uri} has no output.jsonl: expected the output of a run that has ended")
        self._lines = [json.loads(line) for line in data.splitlines()]
        self._bodies = {line["custom_id"]: line["response"]["body"] for line in self._lines if line["response"]}
        self.num_lines = Counter(line["custom_id"] for line in self._lines)

    def told(self, custom_id: str) -> dict[str, Any] | None:
        """Text, finish reason, SHA-256 and usage of a job; None if it has not finished."""
        body = self._bodies.get(custom_id)
        return None if body is None else body["choices"][0] | {"usage": body["usage"]}

    def num_tokens(self) -> int:
        return sum(body["usage"]["completion_tokens"] for body in self._bodies.values())

    def num_recomputed_tokens(self) -> int:
        """Tokens that were generated, lost and generated again, over all attempts at all jobs."""
        return sum(body["metrics"]["num_recomputed_tokens"] for body in self._bodies.values())

    def resumes(self) -> dict[str, int]:
        """Count the attempts that went on from where another one had ended, by kind."""
        attempts = [attempt for body in self._bodies.values() for attempt in body["metrics"]["attempts"]]
        return dict(Counter(attempt["resume"]["kind"] for attempt in attempts if attempt["resume"]))


def compare(custom_ids: Sequence[str], undisturbed: RunOutput, disturbed: RunOutput) -> tuple[JobComparison, ...]:
    """Compare the jobs one by one; a job without output, or with two, is not identical."""
    return tuple(_compare_job(custom_id, undisturbed, disturbed) for custom_id in custom_ids)


def _compare_job(custom_id: str, undisturbed: RunOutput, disturbed: RunOutput) -> JobComparison:
    before, after = undisturbed.told(custom_id), disturbed.told(custom_id)
    num_lines = disturbed.num_lines[custom_id]
    return JobComparison(
        custom_id=custom_id,
        undisturbed_sha256=before["token_ids_sha256"] if before else None,
        disturbed_sha256=after["token_ids_sha256"] if after else None,
        num_lines=num_lines,
        is_identical=before is not None and before == after and num_lines == 1,
    )


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
