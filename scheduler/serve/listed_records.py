"""All files or all batches in memory, in order of their creation, and pages of them."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterable
from typing import Generic, Literal, Protocol, TypeVar

from swiftbatch.scheduler.serve.refusals import RefusedError

Order = Literal["asc", "desc"]


class Listed(Protocol):
    """A record that a catalogue can hold."""

    @property
    def id(self) -> str: ...
    @property
    def created(self) -> float: ...
    @property
    def owner(self) -> str | None: ...


Record = TypeVar("Record", bound=Listed)


class Catalogue(Generic[Record]):
    """Records by their ids; threads may share it."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._lock = threading.Lock()
        self._by_id = {record.id: record for record in records}
        self._keys = sorted(map(_key, self._by_id.values()))

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, record: Record) -> None:
        """Take a record in, in place of an older one of that id."""
        with self._lock:
            if record.id not in self._by_id:
                bisect.insort(self._keys, _key(record))
            self._by_id[record.id] = record

    def remove(self, record_id: str) -> None:
        """Forget a record; one that is not there is fine."""
        with self._lock:
            record = self._by_id.pop(record_id, None)
            if record is not None:
                del self._keys[bisect.bisect_left(self._keys, _key(record))]

    def get(self, record_id: str, owner: str | None) -> Record | None:
        """The record, if there is one and it is the owner's."""
        record = self._by_id.get(record_id)
        return record if record is not None and record.owner == owner else None

    def all(self) -> list[Record]:
        """All records, oldest first."""
        with self._lock:
            return [self._by_id[record_id] for _, record_id in self._keys]

    def page(
        self,
        owner: str | None,
        after: str | None,
        limit: int,
        order: Order,
        is_wanted: Callable[[Record], bool] = lambda _: True,
    ) -> tuple[list[Record], bool]:
        """At most `limit` of the owner's records behind the one with the id `after`, and whether there are more.

        Raises RefusedError where there is none of that id.
        """
        with self._lock:
            found: list[Record] = []
            for place in self._places(owner, after, order):
                record = self._by_id[self._keys[place][1]]
                if record.owner != owner or not is_wanted(record):
                    continue
                if len(found) == limit:
                    return found, True
                found.append(record)
            return found, False

    def _places(self, owner: str | None, after: str | None, order: Order) -> range:
        """The places of what is behind `after` among the keys."""
        first, end = 0, len(self._keys)
        if after is not None:
            record = self.get(after, owner)
            if record is None:
                problem = f"after: found {after[:80]!a}, expected the id of an object in this list"
                raise RefusedError(problem, param="after")
            place = bisect.bisect_left(self._keys, _key(record))
            first, end = (place + 1, end) if order == "asc" else (first, place)
        return range(first, end) if order == "asc" else range(end - 1, first - 1, -1)


def _key(record: Listed) -> tuple[float, str]:
    return record.created, record.id
