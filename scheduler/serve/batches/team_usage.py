"""Sums what batches used: of each team, and of each team in a month."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import TypeVar

from swiftbatch.jobs.run.run_records import in_parallel
from swiftbatch.scheduler.serve.batches.batch_queue import Usage, usage_of
from swiftbatch.scheduler.serve.records.stored_objects import Batch

Group = TypeVar("Group", bound=Hashable)


@dataclass(frozen=True)
class TeamUsage:
    """The sums of some batches; batches without a price add no cost, and None says that no batch has one."""

    num_batches: int = 0
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    num_generated_tokens: int = 0
    worker_seconds: float = 0.0
    cost: float | None = None

    def __add__(self, other: TeamUsage) -> TeamUsage:
        costs = [each.cost for each in (self, other) if each.cost is not None]
        counts = {name: getattr(self, name) + getattr(other, name) for name in COUNTS}
        return TeamUsage(**counts, cost=sum(costs) if costs else None)


COUNTS = tuple(field.name for field in fields(TeamUsage) if field.name != "cost")


def _of_one(used: Usage | None) -> TeamUsage:
    if used is None:  # it has not begun
        return TeamUsage(1)
    num_tokens = used.num_input_tokens, used.num_output_tokens, used.num_tokens
    return TeamUsage(1, *num_tokens, used.worker_seconds, used.cost)


def usage_of_teams(usages: Iterable[tuple[Group, Usage | None]]) -> dict[Group, TeamUsage]:
    """Sum the usage of batches, each with its group."""
    sums: dict[Group, TeamUsage] = {}
    for group, used in usages:
        sums[group] = sums.get(group, TeamUsage()) + _of_one(used)
    return sums


def usage_by_month(batches: Iterable[Batch]) -> dict[tuple[str, str], TeamUsage]:
    """Return sums by month and key, ordered; a batch counts in the month in which it was created, in UTC.

    A name is "" without keys. Raises StoreError.
    """
    found = list(batches)
    usages = in_parallel(usage_of, found)
    months = (datetime.fromtimestamp(batch.created, UTC).strftime("%Y-%m") for batch in found)
    groups = zip(months, (batch.owner or "" for batch in found), strict=True)
    return dict(sorted(usage_of_teams(zip(groups, usages, strict=True)).items()))
