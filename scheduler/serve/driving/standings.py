"""The standings of batches' owners, from what is in the batches' folders: a server that starts knows it all again."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable

from swiftbatch.scheduler.serve.batches import Batch
from swiftbatch.scheduler.serve.driving.course import Course
from swiftbatch.scheduler.serve.driving.queue import DAY, Standing, Usage, standing_of, usage_of_ended
from swiftbatch.scheduler.serve.keyring import Rights

FRESH_SECONDS = 1.0  # however often it is asked meanwhile


class Standings:
    """Knows the usage of batches that have ended, a day long, and is told of the others."""

    def __init__(self, batches: Iterable[Batch], rights: Callable[[str | None], Rights]) -> None:
        self._rights = rights
        self._ended: defaultdict[str | None, list[Usage]] = defaultdict(list)
        self._known: dict[str | None, tuple[float, Standing]] = {}
        for batch in batches:
            if (usage := usage_of_ended(batch)) is not None:
                self._ended[batch.owner].append(usage)
        for owner, usages in self._ended.items():
            self._ended[owner] = _of_a_day(usages)

    def add_ended(self, batch: Batch) -> None:
        """Take in a batch that has ended; others are no matter."""
        if (usage := usage_of_ended(batch)) is not None:
            self._ended[batch.owner] = _of_a_day([*self._ended[batch.owner], usage])

    def forget(self) -> None:
        """Forget computed standings: something has changed, such as that a batch has begun."""
        self._known.clear()

    def of(self, owner: str | None, courses: Iterable[Course]) -> Standing:
        """The standing of an owner, with those of the courses that are its own."""
        now = time.time()
        computed, standing = self._known.get(owner, (-FRESH_SECONDS, Standing()))
        if not 0 <= now - computed < FRESH_SECONDS:
            own = [course for course in courses if course.batch.owner == owner]
            running = [course.usage_now(now) for course in own if course.stage == "running"]
            at_rest = [course.usage_now(now) for course in own if course.stage != "running"]
            standing = standing_of(self._rights(owner), [*self._ended[owner], *at_rest], running, now)
            self._known[owner] = now, standing
        return standing


def _of_a_day(usages: Iterable[Usage]) -> list[Usage]:
    now = time.time()
    return [each for each in usages if now - each.ended < DAY]
