"""The waiting jobs that no worker has ever had, in arrays. Each call costs the same however many there are.

Their order is worked out once. A job that is taken out, in its turn or out of it, is passed over from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from swiftbatch.jobs.run.job_index import JobEntry, JobIndex
from swiftbatch.jobs.shared_prompts import SharedPrompt
from swiftbatch.scheduler.driver.expected_lengths import Forecast
from swiftbatch.scheduler.driver.unfinished_job import JobPlace, UnfinishedJob, length_class

NO_GROUP = -1
ROWS_AT_ONCE = 256
MOST_ENTRIES = 16 * ROWS_AT_ONCE


class UntouchedJobs:
    """Jobs by priority, then the longest first, equals in file order. Tickets of theirs are negative."""

    def __init__(
        self, index: JobIndex, priorities: NDArray[np.int64], groups: NDArray[np.int32], shared: NDArray[np.int32]
    ) -> None:
        """Take for each job of `index` its priority, and what `SharedPrompt` says of its prompt or `NO_GROUP`."""
        self._index = index
        self._priorities, self._groups, self._shared = priorities, groups, shared
        self._is_out = np.zeros(len(index), bool)
        self._entries: dict[int, JobEntry] = {}  # of rows whose turn may come soon
        self.num_left = len(index)
        self.num_tokens_left = int(index.columns["max_tokens"].sum(dtype=np.int64))
        self.most_tokens = int(index.columns["max_tokens"].max(initial=0))
        self._put_in_order(index.columns["max_tokens"].astype(np.int64))

    @classmethod
    def none(cls) -> UntouchedJobs:
        none = np.zeros(0, np.int32)
        return cls(JobIndex.of([]), none.astype(np.int64), none, none)

    def expect(self, forecast: Forecast) -> None:
        """Have the jobs that are left wait by the lengths that they are expected to come to."""
        columns = self._index.columns
        self._put_in_order(forecast.of_new(columns["num_prompt_tokens"], columns["max_tokens"]))

    def _put_in_order(self, num_tokens: NDArray[np.int64]) -> None:
        """Work the order out of the numbers of tokens that jobs are to draw."""
        rows, columns = np.flatnonzero(~self._is_out), self._index.columns
        self._lengths = columns["num_prompt_tokens"] + num_tokens
        order = np.lexsort((columns["line_number"][rows], -self._lengths[rows], self._priorities[rows]))
        self._order = rows[order].astype(np.int32)
        self._first_of_class = _starts(self._priorities[self._order], self._lengths[self._order])  # in `_order`
        self._by_group = self._order[np.argsort(self._groups[self._order], kind="stable")]
        self._sorted_groups = self._groups[self._by_group]
        self._first = self._first_fresh = 0  # in `_order`
        self._first_of: dict[int, int] = {}  # in `_by_group`
        self._known: dict[int, JobPlace] = {}  # of the rows that were looked at and are still in
        self.num_expected_left = int(num_tokens[rows].sum())

    def first(self) -> JobPlace | None:
        """The first job."""
        self._first = self._passed(self._order, self._first, lambda row: bool(self._is_out[row]))
        return self._place(self._order, self._first)

    def first_fresh(self, begun: Container[int]) -> JobPlace | None:
        """The first job whose group, if any, is not one of the `begun`, to which others may only be added."""

        def is_passed(row: int) -> bool:
            return bool(self._is_out[row]) or int(self._groups[row]) in begun

        self._first_fresh = self._passed(self._order, self._first_fresh, is_passed)
        return self._place(self._order, self._first_fresh)

    def first_of(self, group: int) -> JobPlace | None:
        """The first job of a group."""
        start = self._first_of.get(group)
        if start is None:
            start = int(self._sorted_groups.searchsorted(group))
        start = self._passed(self._by_group, start, lambda row: bool(self._is_out[row]) and self._groups[row] == group)
        self._first_of[group] = start
        is_there = start < len(self._by_group) and self._sorted_groups[start] == group
        return self._place(self._by_group, start) if is_there else None

    def first_of_class(self, priority: int, length_class: int) -> JobPlace | None:
        """The first job of a priority whose length is of a class."""
        start = self._first_of_class.get((priority, length_class))
        if start is None:
            return None
        start = self._passed(self._order, start, lambda row: bool(self._is_out[row]))
        self._first_of_class[priority, length_class] = start
        place = self._place(self._order, start)
        is_there = place is not None and (place.priority, place.job.length_class) == (priority, length_class)
        return place if is_there else None

    def take(self, ticket: int) -> None:
        """Take the job of a ticket out."""
        row = ticket + len(self._index)
        if not self._is_out[row]:
            self._is_out[row] = True
            self._known.pop(row, None)
            self.num_left -= 1
            self.num_tokens_left -= int(self._index.columns["max_tokens"][row])
            self.num_expected_left -= int(self._lengths[row]) - int(self._index.columns["num_prompt_tokens"][row])

    def take_all(self, job_ids: Iterable[str]) -> list[UnfinishedJob]:
        """Take out those of these jobs that nobody has taken out yet; unknown ids are passed over."""
        rows = [int(row) for row in self._index.rows_of("job_id", job_ids) if not self._is_out[row]]
        jobs = [self._job(row, self._index.entry(row)) for row in rows]
        for row in rows:
            self.take(row - len(self._index))
        return jobs

    def expected_lengths(self) -> NDArray[np.int64]:
        """The tokens that the jobs which are left are expected to draw."""
        is_left = ~self._is_out
        lefts: NDArray[np.int64] = self._lengths[is_left] - self._index.columns["num_prompt_tokens"][is_left]
        return lefts

    def job_ids(self) -> Iterator[str]:
        """The ids of all jobs that are still in, in input order."""
        return (job_id for row, job_id in enumerate(self._index.job_ids()) if not self._is_out[row])

    def places(self) -> NDArray[np.int64]:
        """The places of the jobs that are left in the tables of their run."""
        return self._index.places[~self._is_out]

    def _passed(self, order: NDArray[np.int32], start: int, is_passed: Callable[[int], bool]) -> int:
        while start < len(order) and is_passed(int(order[start])):
            start += 1
        return start

    def _place(self, order: NDArray[np.int32], start: int) -> JobPlace | None:
        if start >= len(order):
            return None
        row = int(order[start])
        if row not in self._known:
            if row not in self._entries and order is self._order:
                self._read_ahead(start)
            entry = self._entries.pop(row) if row in self._entries else self._index.entry(row)
            job = self._job(row, entry)
            number, ticket = job.entry.line_number, row - len(self._index)
            self._known[row] = JobPlace(job.priority, -job.length, number, ticket, job)
        return self._known[row]

    def _read_ahead(self, start: int) -> None:
        """Read the jobs from a place of the order on: many at once cost a fraction for each."""
        rows = self._order[start : start + ROWS_AT_ONCE].astype(np.int64)
        rows = rows[~self._is_out[rows]]
        if len(self._entries) > MOST_ENTRIES:  # of jobs that were taken out of their turn
            self._entries.clear()
        self._entries.update(zip(rows.tolist(), self._index.some(rows).entries(), strict=True))

    def _job(self, row: int, entry: JobEntry) -> UnfinishedJob:
        group, num_tokens = int(self._groups[row]), int(self._shared[row])
        prompt = SharedPrompt(None if group == NO_GROUP else group, num_tokens)
        return UnfinishedJob(
            entry,
            priority=int(self._priorities[row]),
            prompt=prompt,
            length=int(self._lengths[row]),
            ticket=row - len(self._index),
        )


def _starts(priorities: NDArray[np.int64], lengths: NDArray[np.int64]) -> dict[tuple[int, int], int]:
    """The beginnings of each class of lengths of each priority, in the order of jobs."""
    is_other = np.ones(len(lengths), bool)
    is_other[1:] = (priorities[1:] != priorities[:-1]) | (lengths[1:] != lengths[:-1])
    starts: dict[tuple[int, int], int] = {}
    for start in np.flatnonzero(is_other).tolist():
        starts.setdefault((int(priorities[start]), length_class(int(lengths[start]))), start)
    return starts
