"""The priorities of lines from the newest submission: lines with lower values begin first.

priorities.json    those that are not 0, if any

Priorities affect no token, so they are not part of a job.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pydantic import TypeAdapter

from swiftbatch.jobs.run.run_records import RunError, read_parsed
from swiftbatch.jobs.storage.store import Store

FILE = "priorities.json"
PRIORITIES = TypeAdapter(dict[str, int])


def priorities_of(store: Store) -> dict[str, int]:
    """Return the priorities that are not 0; none if the file is damaged."""
    try:
        return read_parsed(store, FILE, PRIORITIES.validate_json) or {}
    except RunError:
        return {}


def set_priorities(store: Store, custom_ids: Iterable[str], priorities: Mapping[str, int]) -> None:
    """Set the priorities of a submission's lines; other lines keep theirs."""
    before = priorities_of(store)
    if not before and not priorities:
        return
    now = before | {name: priorities.get(name, 0) for name in custom_ids if name in before or name in priorities}
    now = {custom_id: priority for custom_id, priority in now.items() if priority}
    if now != before:
        store.write(FILE, PRIORITIES.dump_json(now, indent=1) + b"\n")
