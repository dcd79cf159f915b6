"""The forms of a job, each in the place of the one before: its lineage."""

from __future__ import annotations

from collections.abc import Container, Iterable


def lineages(pairs: Iterable[tuple[str, str | None]]) -> list[list[str]]:
    """The ids of each job from its first form to its newest, in input order.

    `pairs` are the jobs of all tables in their order, each with the job that it supersedes. Two commands at once may
    both have added a job, or have taken the same one on: what came first in the tables stays.
    """
    found: list[list[str]] = []
    by_job_id: dict[str, list[str]] = {}
    for job_id, superseded in pairs:
        if job_id in by_job_id:
            continue
        lineage = by_job_id.get(superseded or "")
        if lineage is None:
            found.append(lineage := [])
        elif lineage[-1] != superseded:
            continue
        lineage.append(job_id)
        by_job_id[job_id] = lineage
    return found


def newest_with(lineage: list[str], job_ids: Container[str]) -> str | None:
    """The newest form of a job that is one of `job_ids`."""
    return next((job_id for job_id in reversed(lineage) if job_id in job_ids), None)
