"""Chooses the jobs that go back to the queue when the caches of a worker outgrow its memory."""

from __future__ import annotations

from collections.abc import Collection

from swiftbatch.worker.caches.memory.pages import pages_of
from swiftbatch.worker.session.running_job import RunningJob


def without_room(jobs: Collection[RunningJob], num_pages: int | None, num_beside: int = 0) -> list[RunningJob]:
    """The jobs that have to leave before the next step: the youngest, as few as possible; the eldest always stays.

    Age counts from a job's first attempt in the run. So no job ever makes an older one leave, on no worker: two can't
    throw each other out in turns, and the eldest of all reaches its end. The youngest is, as a rule, the one that loses
    least, too: it has run for the shortest time, and long jobs begin first. `num_beside` are the positions that the
    states of a job's layers take room of.
    """
    by_age = sorted(jobs, key=lambda job: job.assignment.seniority)
    num_used, leaving = num_pages_in_use(jobs, num_beside), list[RunningJob]()
    while num_pages is not None and num_used > num_pages and len(by_age) > 1:
        leaving.append(by_age.pop())
        num_used -= num_pages_in_use(leaving[-1:], num_beside)
    return leaving


def num_pages_in_use(jobs: Collection[RunningJob], num_beside: int = 0) -> int:
    """The pages that jobs take for all tokens that they have, those that are still to be read included."""
    return sum(pages_of(len(job.sequence) + num_beside) for job in jobs)
