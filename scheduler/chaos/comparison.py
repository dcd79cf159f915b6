"""Compares two runs of the same jobs: every job's output, token for token."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from swiftbatch.jobs.frozen import Frozen
from swiftbatch.jobs.run.run import Run
from swiftbatch.scheduler.chaos.chaos_options import ChaosError


class JobComparison(Frozen):
    """One job's SHA-256 over its generated tokens, undisturbed and disturbed; None where it has no output."""

    custom_id: str
    undisturbed_sha256: str | None
    disturbed_sha256: str | None
    num_lines: int  # of the job in the disturbed run's output: 1
    is_identical: bool  # tokens, text and finish reason


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

    def choice(self, custom_id: str) -> dict[str, Any] | None:
        """Text, finish reason and SHA-256 of a job; None if it has not finished."""
        body = self._bodies.get(custom_id)
        return None if body is None else body["choices"][0]

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
    before, after = undisturbed.choice(custom_id), disturbed.choice(custom_id)
    num_lines = disturbed.num_lines[custom_id]
    return JobComparison(
        custom_id=custom_id,
        undisturbed_sha256=before["token_ids_sha256"] if before else None,
        disturbed_sha256=after["token_ids_sha256"] if after else None,
        num_lines=num_lines,
        is_identical=before is not None and before == after and num_lines == 1,
    )
