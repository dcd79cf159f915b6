"""The names of the jobs of a run, read without prompts and without the run's manifest."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from swiftbatch.jobs.run.lineages import lineages
from swiftbatch.jobs.run.table_parts import read_parts
from swiftbatch.jobs.storage.store import Store


@dataclass(frozen=True, slots=True)
class JobName:
    """A job, and which one of how many choices of its line it is."""

    job_id: str
    custom_id: str
    choice_index: int
    num_choices: int

    @property
    def name(self) -> str:
        """The name of the job for people and events, equal to `Job.name`."""
        return self.custom_id if self.num_choices == 1 else f"{self.custom_id}[{self.choice_index}]"


def job_names(store: Store) -> list[JobName]:
    """The jobs of a run in input order, each in its newest form. Raises RunError, StoreError."""
    parts = read_parts(store, ["job_id", "supersedes", "custom_id"])
    rows = [row for part in parts for row in zip(*(column.to_pylist() for column in part.columns), strict=True)]
    custom_ids = {job_id: custom_id for job_id, _, custom_id in rows}
    newest = [lineage[-1] for lineage in lineages((job_id, superseded) for job_id, superseded, _ in rows)]
    num_choices = Counter(custom_ids[job_id] for job_id in newest)
    seen: Counter[str] = Counter()
    found = []
    for job_id in newest:
        custom_id = custom_ids[job_id]
        found.append(JobName(job_id, custom_id, seen[custom_id], num_choices[custom_id]))
        seen[custom_id] += 1
    return found
