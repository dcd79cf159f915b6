"""The number of jobs that a worker runs at a time: as asked, else as many as gain, and as its memory has room for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swiftbatch.worker.kernels.sizes import MOST_SLOTS

if TYPE_CHECKING:
    from swiftbatch.jobs.job import JobRecord
    from swiftbatch.scheduler.driver.fleet import Fleet, Worker

MEMORY_SHARE = 0.8  # of what is free, for caches; drafts and checkpoints on their way need some, too


class Slots:
    """Says whether a worker takes one more job beside those that it has."""

    def __init__(self, num_slots: int | None, fleet: Fleet) -> None:
        """`num_slots` is what the user asked for, None to leave it to the worker's memory."""
        self._num_slots = num_slots
        self._fleet = fleet

    def has_room(self, worker: Worker, held: list[JobRecord], record: JobRecord) -> bool:
        """Tell whether a worker with the jobs `held` takes another one, and has room for one as long as any of them."""
        most = worker.info.num_slots if worker.info else None  # a GPU's, made when it started
        if self._num_slots is not None or most is not None:
            return len(held) < min(number for number in (self._num_slots, most) if number is not None)
        return not held or (len(held) < MOST_SLOTS and self._fits_one_more(worker, held, record))

    def _fits_one_more(self, worker: Worker, held: list[JobRecord], record: JobRecord) -> bool:
        lengths = [each.max_length for each in held]
        return sum(lengths) + max(record.max_length, *lengths) <= self._num_positions(worker)

    def _num_positions(self, worker: Worker) -> float:
        """The worker's share of its machine's memory; who is still to start may come to the same machine."""
        if worker.info is None:
            return 0.0
        nodes = [each.info.node_id if each.info else worker.info.node_id for each in self._fleet.workers]
        return MEMORY_SHARE * worker.info.num_free_positions / nodes.count(worker.info.node_id)
