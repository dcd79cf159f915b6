"""The shard settings of a run: whether it writes shards, in which format, and with how many rows each.

shards.json    if a submission asked for them

The plan of each shard: the lines it holds, so many rows and no more bytes than fit a machine.

It is written before the shard, so that later drivers make the same one.

shard-plans/<number:05d>-<epoch:04d>.json    never changed; of one number, the plan of the newest epoch counts

A driver writes its plan first, then looks whether it still holds the run, then writes the shard. A driver that comes
later claims the run first, and looks for plans then: so it sees every plan whose shard may ever be written, and repeats
it in its own name before it writes that shard.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple, Self, get_args

from pydantic import Field, ValidationError

from swiftbatch.jobs.frozen_records import Frozen
from swiftbatch.jobs.run.checked_reading import NUM_READERS, RunError, pretty, read_model
from swiftbatch.jobs.storage.store import Store

FILE = "shards.json"
MAX_ROWS = 1_000_000

ShardFormat = Literal["parquet", "jsonl"]


class ShardSettings(Frozen):
    """The format stays over all of a run; the number of rows holds for the shards that are yet to be written."""

    format: ShardFormat
    rows_per_shard: int = Field(default=1000, ge=1, le=MAX_ROWS)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse what a user says, such as "parquet" or "jsonl:500". Raises ValueError."""
        kind, has_rows, rows = text.partition(":")
        try:
            return cls.model_validate({"format": kind} | ({"rows_per_shard": rows} if has_rows else {}))
        except ValidationError:
            formats = " or ".join(get_args(ShardFormat))
            expected = f"expected {formats}, and behind a colon 1 to {MAX_ROWS:,} rows, as in parquet:500"
            raise ValueError(f"found {text!a}, {expected}") from None


def shard_settings(store: Store) -> ShardSettings | None:
    """The shards that the run was asked for; None if it writes none. Raises RunError for a damaged file."""
    return read_model(store, FILE, ShardSettings)


def ask_for_shards(store: Store, settings: ShardSettings) -> None:
    """Have the run write shards from now on; those who hold it may say so. Raises RunError for another format."""
    before = shard_settings(store)
    if before is not None and before.format != settings.format:
        raise RunError(
            f"the run at {store.shown_uri} has shards of format {before.format}, found {settings.format}: "
            f"use --output-shards {before.format}, leave the option away, or use another run folder"
        )
    if before != settings:
        store.write(FILE, pretty(settings))


FOLDER = "shard-plans"
NAME = re.compile(r"([0-9]{5,})-([0-9]{4,})\.json")

LineKey = tuple[tuple[str, str | None], ...]
MAX_BYTES = 256 * 2**20


class Failure(Frozen):
    """The reason why a job has no result. The plan keeps it, since a job that is tried again loses its error."""

    code: str
    message: str


class PlannedLine(Frozen):
    """An input line as it ended: the job behind each choice, and what failed of them.

    `revision` is 0 when the line first ended, and one more each time it ended anew, after `extend` or `resume
    --retry-failed`.
    """

    custom_id: str
    revision: int = Field(default=0, ge=0)
    jobs: tuple[str, ...]
    failures: dict[str, Failure] = Field(default={})

    @property
    def key(self) -> LineKey:
        """The end of the line: each job, with the code of its error if it has no result."""
        codes = {job_id: failure.code for job_id, failure in self.failures.items()}
        return tuple((job_id, codes.get(job_id)) for job_id in self.jobs)


class Plan(Frozen):
    """The lines of one shard, in its order."""

    lines: tuple[PlannedLine, ...]


class Plans:
    """The plans of a run, as the driver of an epoch sees and writes them."""

    def __init__(self, store: Store, epoch: int) -> None:
        self._store = store
        self._epoch = epoch

    def read(self) -> dict[int, Plan]:
        """The plan of each number. Raises RunError for a damaged one, StoreError."""
        newest: dict[int, tuple[int, str]] = {}
        for name in self._store.list(FOLDER):
            if (found := NAME.fullmatch(name)) and int(found[2]) <= self._epoch:
                newest[int(found[1])] = max(newest.get(int(found[1]), (0, "")), (int(found[2]), name))
        with ThreadPoolExecutor(NUM_READERS) as pool:
            plans = pool.map(lambda each: read_model(self._store, f"{FOLDER}/{each[1]}", Plan), newest.values())
            return {number: plan for number, plan in sorted(zip(newest, plans, strict=True)) if plan is not None}

    def write(self, number: int, plan: Plan) -> None:
        """Write a plan in this driver's name, or repeat it there. Raises StoreError."""
        path = f"{FOLDER}/{number:05d}-{self._epoch:04d}.json"
        self._store.write_new(path, plan.model_dump_json().encode() + b"\n")


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
