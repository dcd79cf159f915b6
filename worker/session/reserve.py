"""Jobs that a worker has and has not begun: each takes the place of one that leaves, without a word to the driver."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from swiftbatch.worker.caches.memory.pages import PAGE, Growth, has_window_pages, most_pages
from swiftbatch.worker.session.running_job import JobSizes, RunningJob
from swiftbatch.worker.session.work import Assignment, Orders


class CacheRoom(NamedTuple):
    """The memory of a worker for caches: so many pages, None where that is no question."""

    num_pages: int | None
    sizes: JobSizes = JobSizes()

    def has_room(self, jobs: Collection[RunningJob], assignment: Assignment) -> bool:
        """Tell whether a job may be expected to fit beside others for a while; alone it always does."""
        if self.num_pages is None or not jobs:
            return True
        job, num_tokens = assignment.sent, assignment.num_reported_tokens
        growths = [self._growth_of(job) for job in jobs]
        growths.append(self._growth(job.num_prompt_tokens, num_tokens, assignment))
        has_pages = most_pages(growths, self.sizes.page, self.sizes.held) <= self.num_pages
        return has_pages and has_window_pages(growths, self.sizes.page or PAGE, self.sizes.windows)

    def _growth_of(self, job: RunningJob) -> Growth:
        sequence = job.sequence
        return self._growth(sequence.num_prompt_tokens, sequence.num_generated_tokens, job.assignment)

    def _growth(self, num_prompt_tokens: int, num_tokens: int, assignment: Assignment) -> Growth:
        num_before, num_expected = num_prompt_tokens + self.sizes.num_beside, assignment.num_expected_tokens
        end = num_before + max(num_tokens, num_expected)
        return Growth(num_before + num_tokens, end, assignment.num_shared_tokens)


class Reserve:
    """The jobs of one worker that are still to begin, in the order in which the driver gave them."""

    def __init__(self) -> None:
        self._waiting: dict[str, Assignment] = {}
        self._num_slots: int | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def follow(self, orders: Orders) -> list[str]:
        """Take new jobs in, and drop what is cancelled; returns the recalled jobs that have not begun."""
        self._num_slots = orders.num_slots
        for job_id in orders.cancelled:
            self._waiting.pop(job_id, None)
        recalled = [job_id for job_id in orders.recalled if self._waiting.pop(job_id, None)]
        self._waiting |= {assignment.job_id: assignment for assignment in orders.reserve}
        return recalled

    def keep_to(self, num_jobs: int) -> None:
        """Have no more than so many jobs run until the next orders: memory has run out."""
        self._num_slots = num_jobs

    def next(self, jobs: Collection[RunningJob], room: CacheRoom) -> Assignment | None:
        """Take the first job that has room beside those that run; None if none.

        A shorter one may go before a long one, which is asked for first again when that has ended.
        """
        if self._num_slots is not None and len(jobs) >= max(1, self._num_slots):
            return None
        found = next((each for each in self._waiting.values() if room.has_room(jobs, each)), None)
        return self._waiting.pop(found.job_id) if found else None

    def give_up(self) -> list[str]:
        """Hand all back."""
        waiting, self._waiting = list(self._waiting), {}
        return waiting
