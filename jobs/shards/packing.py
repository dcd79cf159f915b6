"""Lines that have ended are put into shards: so many rows each, and no more bytes than fit a machine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from swiftbatch.jobs.shards.plans import PlannedLine

MAX_BYTES = 256 * 2**20


class SizedLine(NamedTuple):
    """A line with the bytes of its results and prompts."""

    line: PlannedLine
    num_bytes: int


def packed(
    lines: Iterable[SizedLine], max_rows: int, takes_all: bool, max_bytes: int = MAX_BYTES
) -> tuple[list[list[PlannedLine]], int]:
    """The lines of each shard that is full, in order, and the number of rows that wait for more.

    A line is never divided: one that is larger than a shard has one of its own. With `takes_all` nothing waits.
    """
    full: list[list[PlannedLine]] = []
    shard: list[PlannedLine] = []
    num_rows = num_bytes = 0
    for line, size in lines:
        if shard and (num_rows + len(line.jobs) > max_rows or num_bytes + size > max_bytes):
            full.append(shard)
            shard, num_rows, num_bytes = [], 0, 0
        shard.append(line)
        num_rows += len(line.jobs)
        num_bytes += size
    if shard and (takes_all or num_rows >= max_rows or num_bytes >= max_bytes):
        full.append(shard)
        num_rows = 0
    return full, num_rows
