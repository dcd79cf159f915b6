"""The shards of a run: settings, plans and files of rows."""

from __future__ import annotations

import json
import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import BinaryIO, Literal, NamedTuple, Self, get_args

from pydantic import Field, ValidationError

from swiftbatch.jobs.job import LINE_END, Job, JobRecord
from swiftbatch.jobs.json_records import Frozen, dump_line
from swiftbatch.jobs.run.job_table import LATER_COLUMN, newest_with
from swiftbatch.jobs.run.output_line import plain
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import RunError, in_parallel, pretty, read_model
from swiftbatch.jobs.run.table_rows import (
    COLUMNS,
    LIST,
    MESSAGE,
    KeptColumns,
    Row,
    arrow_schema,
    failed_row,
    row_groups,
    row_of,
)
from swiftbatch.jobs.storage.store import Store, spool

SETTINGS_FILE = "shards.json"
MAX_ROWS = 1_000_000

ShardFormat = Literal["parquet", "jsonl"]


class ShardSettings(Frozen):
    """The format is fixed for a run; the number of rows applies to later shards."""

    format: ShardFormat
    rows_per_shard: int = Field(default=1000, ge=1, le=MAX_ROWS)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse text such as "parquet" or "jsonl:500". Raises ValueError."""
        kind, has_rows, rows = text.partition(":")
        try:
            return cls.model_validate({"format": kind} | ({"rows_per_shard": rows} if has_rows else {}))
        except ValidationError:
            formats = " or ".join(get_args(ShardFormat))
            expected = f"expected {formats}, and behind a colon 1 to {MAX_ROWS:,} rows, as in parquet:500"
            raise ValueError(f"found {text!a}, {expected}") from None


def shard_settings(store: Store) -> ShardSettings | None:
    """Return the run's shard settings, if any. Raises RunError."""
    return read_model(store, SETTINGS_FILE, ShardSettings)


def ask_for_shards(store: Store, settings: ShardSettings) -> None:
    """Make the held run write shards. Raises RunError if the run already has shards of another format."""
    before = shard_settings(store)
    if before is not None and before.format != settings.format:
        raise RunError(
            f"the run at {store.shown_uri} has shards of format {before.format}, found {settings.format}: "
            f"use --output-shards {before.format}, leave the option away, or use another run folder"
        )
    if before != settings:
        store.write(SETTINGS_FILE, pretty(settings))


PLANS_FOLDER = "shard-plans"
NAME = re.compile(r"([0-9]{5,})-([0-9]{4,})\.json")

LineKey = tuple[tuple[str, str | None], ...]
MAX_SHARD_BYTES = 256 * 2**20


class Failure(Frozen):
    """Reason of a job's failure, kept here because a retry deletes the job's error file."""

    code: str
    message: str


class PlannedLine(Frozen):
    """An ended input line with its jobs and their failures.

    `revision` grows each time the line ends again.
    """

    custom_id: str
    revision: int = Field(default=0, ge=0)
    jobs: tuple[str, ...]
    failures: dict[str, Failure] = Field(default={})

    @property
    def key(self) -> LineKey:
        """Return each job with its error code, or None for a job with a result."""
        codes = {job_id: failure.code for job_id, failure in self.failures.items()}
        return tuple((job_id, codes.get(job_id)) for job_id in self.jobs)


class Plan(Frozen):
    lines: tuple[PlannedLine, ...]
    kinds: dict[str, str] = Field(default_factory=dict)  # of the columns that lines brought along so far


def read_plans(store: Store, epoch: int) -> dict[int, Plan]:
    """Return a run's plans up to an epoch, by number. Raises StoreError, RunError for a damaged one."""
    newest: dict[int, tuple[int, str]] = {}
    for name in store.list(PLANS_FOLDER):
        if (found := NAME.fullmatch(name)) and int(found[2]) <= epoch:
            newest[int(found[1])] = max(newest.get(int(found[1]), (0, "")), (int(found[2]), name))
    plans = in_parallel(lambda each: read_model(store, f"{PLANS_FOLDER}/{each[1]}", Plan), newest.values())
    return {number: plan for number, plan in sorted(zip(newest, plans, strict=True)) if plan is not None}


def write_plan(store: Store, epoch: int, number: int, plan: Plan) -> None:
    """Write the plan of an epoch's driver; writing the same plan again is harmless. Raises StoreError."""
    store.write_new(f"{PLANS_FOLDER}/{number:05d}-{epoch:04d}.json", plan.model_dump_json().encode() + b"\n")


class SizedLine(NamedTuple):
    """A line with the bytes of its results and prompts."""

    line: PlannedLine
    num_bytes: int


def packed(
    lines: Iterable[SizedLine], max_rows: int, takes_all: bool, max_bytes: int = MAX_SHARD_BYTES
) -> tuple[list[list[PlannedLine]], int]:
    """Return the lines of each full shard, and the number of leftover rows.

    A line is never split. `takes_all` leaves nothing over.
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


# Shard files: Parquet with zstd or JSON lines, written in bounded memory, and their dataset card.


CARD_TEXT = """\
# Texts of a swiftbatch run

Each file in `data` is whole and final: the run adds files and never changes one. A row is one choice of one line. Of
rows with the same `custom_id`, those with the highest `revision` are the newest.
"""


def write_shard(target: BinaryIO, kind: ShardFormat, columns: Mapping[str, str], rows: Iterable[Row]) -> None:
    """Write these columns of all rows; equal rows give equal bytes."""
    if kind == "jsonl":
        for row in rows:
            target.write(dump_line({name: row[name] for name in columns}))
        return
    import pyarrow as pa
    from pyarrow import parquet

    schema = arrow_schema(columns)
    with parquet.ParquetWriter(target, schema, compression="zstd") as writer:
        for group in row_groups(rows):
            writer.write_table(pa.Table.from_pylist(group, schema=schema), row_group_size=len(group))


def card(kind: ShardFormat, columns: Mapping[str, str]) -> str:
    features = "".join(_feature(name, column) for name, column in columns.items())
    return (
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n"
        f"    path: data/*.{kind}\ndataset_info:\n  features:\n{features}---\n\n{CARD_TEXT}"
    )


def _feature(name: str, kind: str) -> str:
    if kind == "list of messages":
        fields = "".join(f"    - name: {field}\n      dtype: string\n" for field in MESSAGE)
        return f"  - name: {name}\n    list:\n{fields}"
    quoted = json.dumps(name, ensure_ascii=False)  # a kept column may have any name
    if kind.startswith(LIST):
        return f"  - name: {quoted}\n    list: {kind.removeprefix(LIST)}\n"
    return f"  - name: {quoted}\n    dtype: {kind}\n"


# Shards never change once written, also while the run continues.


class _Jobs:
    """A run's jobs, also superseded ones, in a local file."""

    def __init__(self, run: Run) -> None:
        import numpy as np

        self.custom_ids: dict[str, str] = {}  # by job
        self._places: dict[str, int] = {}
        self._num_prompt_tokens = array("q")
        for part in run.parts("job_id", "custom_id", "num_prompt_tokens"):
            for job_id, custom_id, num_tokens in zip(*(column.to_pylist() for column in part.columns), strict=True):
                self.custom_ids[job_id] = custom_id
                self._places[job_id] = len(self._num_prompt_tokens)
                self._num_prompt_tokens.append(num_tokens)
        self._bodies = run.job_bodies(np.arange(len(self._num_prompt_tokens), dtype=np.int64), ("job", LATER_COLUMN))

    def record(self, job_id: str) -> JobRecord:
        place = self._places[job_id]
        job, kept = self._bodies.at(place).split(LINE_END)
        number = self._num_prompt_tokens[place]
        return JobRecord(job_id, Job.model_validate_json(job), 0, number, kept=kept.decode() or None)

    def num_bytes(self, job_id: str) -> int:
        return self._bodies.num_bytes(self._places[job_id])


SHARDS_FOLDER = "shards"
DATA = f"{SHARDS_FOLDER}/data"
CARD = f"{SHARDS_FOLDER}/README.md"


class WrittenShard(NamedTuple):
    path: str
    num_rows: int


class Shards:
    """The writer of a run's shards, for the driver that holds it."""

    def __init__(self, run: Run, settings: ShardSettings, epoch: int, check: Callable[[], None]) -> None:
        """`check` raises if `epoch` no longer holds the run. Raises RunError, StoreError."""
        self._run, self._settings, self._check = run, settings, check
        self._jobs = _Jobs(run)
        self._lines: dict[str, list[list[str]]] = defaultdict(list)  # by custom_id: the lineage of each choice's job
        for lineage in run.lineages():
            self._lines[self._jobs.custom_ids[lineage[-1]]].append(lineage)
        self._epoch, plans = epoch, read_plans(run.store, epoch)
        self._next_number = max(plans, default=-1) + 1
        self._kept = KeptColumns(COLUMNS, plans[max(plans)].kinds if plans else {})
        for part in run.parts(LATER_COLUMN):
            for kept in part.column(LATER_COLUMN).to_pylist():
                self._kept.note(kept)
        self._newest = {line.custom_id: line for plan in plans.values() for line in plan.lines}
        there = set(run.store.list(DATA))
        self._missing = {number: plan for number, plan in plans.items() if self._name(number) not in there}

    @classmethod
    def of(cls, run: Run, epoch: int, check: Callable[[], None]) -> Self | None:
        settings = shard_settings(run.store)
        return None if settings is None else cls(run, settings, epoch, check)

    def catch_up(self, is_end: bool, max_bytes: int = MAX_SHARD_BYTES) -> tuple[list[WrittenShard], int]:
        """Write missing planned shards, then full new ones; also return the leftover rows.

        `is_end` includes failed lines and a smaller last shard. Raises StoreError, RunError, and as `check`.
        """
        written = [shard for number in list(self._missing) if (shard := self._completed(number)) is not None]
        full, num_waiting = packed(self._due(is_end), self._settings.rows_per_shard, is_end, max_bytes)
        return written + [shard for lines in full if (shard := self._added(lines)) is not None], num_waiting

    def _due(self, is_end: bool) -> Iterator[SizedLine]:
        """Yield ended lines whose outcome differs from their plan."""
        sizes, failed = self._run.ended_sizes()
        failures = self._failures(failed) if is_end else {}
        for custom_id, choices in self._lines.items():
            jobs = []
            for lineage in choices:
                if lineage[-1] in sizes or lineage[-1] in failures:
                    jobs.append(newest_with(lineage, sizes) or lineage[-1])
            line = self._planned(custom_id, jobs, failures) if len(jobs) == len(choices) else None
            if line is not None:
                num_bytes = (sizes.get(job_id, 0) + self._jobs.num_bytes(job_id) for job_id in jobs)
                yield SizedLine(line, sum(num_bytes))

    def _failures(self, failed: set[str]) -> dict[str, Failure]:
        job_ids = sorted(failed)
        lines = zip(job_ids, self._run.error_lines(job_ids), strict=True)
        return {
            job_id: Failure(code=plain(line["error"]["code"]), message=plain(line["error"]["message"]))
            for job_id, line in lines
            if line is not None
        }

    def _planned(self, custom_id: str, jobs: Sequence[str], failures: dict[str, Failure]) -> PlannedLine | None:
        """Return the line for the next plan, or None if the last plan has it unchanged."""
        before = self._newest.get(custom_id)
        own = {job_id: failures[job_id] for job_id in jobs if job_id in failures}
        revision = 0 if before is None else before.revision + 1
        line = PlannedLine(custom_id=custom_id, revision=revision, jobs=tuple(jobs), failures=own)
        return None if before is not None and before.key == line.key else line

    def _completed(self, number: int) -> WrittenShard | None:
        """Write a planned shard that is missing; return None while one of its results is damaged."""
        plan = self._missing[number]
        with spool() as file:
            return (
                self._published(number, file)
                if self._fill(file, plan.lines, KeptColumns(COLUMNS, plan.kinds)) == plan.lines
                else None
            )

    def _added(self, lines: Sequence[PlannedLine]) -> WrittenShard | None:
        """Plan and write a shard of the readable lines, if any."""
        with spool() as file:
            if not (readable := self._fill(file, lines, self._kept)):
                return None
            number, self._next_number = self._next_number, self._next_number + 1
            self._missing[number] = Plan(lines=readable, kinds=self._kept.kinds())
            self._newest |= {line.custom_id: line for line in readable}
            return self._published(number, file)

    def _published(self, number: int, file: BinaryIO) -> WrittenShard:
        plan, path, store = self._missing[number], f"{DATA}/{self._name(number)}", self._run.store
        write_plan(store, self._epoch, number, plan)
        self._check()
        described = card(self._settings.format, COLUMNS | self._kept.columns()).encode()
        if store.read(CARD) != described:  # later lines may bring further columns
            store.write(CARD, described)
        store.write_new_from(path, file)
        del self._missing[number]
        return WrittenShard(path, sum(len(line.jobs) for line in plan.lines))

    def _fill(self, file: BinaryIO, lines: Sequence[PlannedLine], kept: KeptColumns) -> tuple[PlannedLine, ...]:
        readable = []

        def rows() -> Iterator[Row]:
            for line, found in self._rows(lines, kept):
                if found is not None:
                    readable.append(line)
                    yield from found

        write_shard(file, self._settings.format, COLUMNS | kept.columns(), rows())
        file.seek(0)
        return tuple(readable)

    def _rows(self, lines: Sequence[PlannedLine], kept: KeptColumns) -> Iterator[tuple[PlannedLine, list[Row] | None]]:
        """Yield each line with its rows, or with None if a result is unreadable."""
        results = self._run.result_lines(
            [job_id for line in lines for job_id in line.jobs if job_id not in line.failures]
        )
        for line in lines:
            rows: list[Row] = []
            for job_id in line.jobs:
                record = self._jobs.record(job_id)
                own = {"revision": line.revision, **kept.values(record.kept)}
                if (failure := line.failures.get(job_id)) is not None:
                    rows.append(failed_row(record, failure.code, failure.message) | own)
                elif (result := next(results)) is not None:
                    rows.append(row_of(record, result) | own)
            yield line, rows if len(rows) == len(line.jobs) else None

    def _name(self, number: int) -> str:
        return f"train-{number:05d}.{self._settings.format}"
