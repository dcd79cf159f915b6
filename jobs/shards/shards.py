"""The shards of a run: files of rows that are written while the run goes on, and never change.

shards/README.md                     what `datasets.load_dataset` reads first
shards/data/train-<number:05d>.*     each with the lines that its plan names, see `shard_settings.py`
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, NamedTuple, Self

from swiftbatch.jobs.run.job_table import newest_with
from swiftbatch.jobs.run.output import temporary_file
from swiftbatch.jobs.run.output_line_fields import plain
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.shards.shard_file import Row, card, failed_row, finished_row, write_shard
from swiftbatch.jobs.shards.shard_settings import (
    MAX_BYTES,
    Failure,
    Plan,
    PlannedLine,
    Plans,
    ShardSettings,
    SizedLine,
    packed,
    shard_settings,
)

FOLDER = "shards"
DATA = f"{FOLDER}/data"


class WrittenShard(NamedTuple):
    path: str
    num_rows: int


class Shards:
    """Writes the shards of a run, for the driver that holds it."""

    def __init__(self, run: Run, settings: ShardSettings, epoch: int, check: Callable[[], None]) -> None:
        """`check` raises where the driver of that epoch no longer holds the run. Raises RunError, StoreError."""
        self._run, self._settings, self._check = run, settings, check
        self._records = run.all_jobs()
        self._lines: dict[str, list[list[str]]] = defaultdict(list)  # by custom_id: the forms of each choice's job
        for lineage in run.lineages():
            self._lines[self._records[lineage[-1]].job.custom_id].append(lineage)
        self._plans = Plans(run.store, epoch)
        plans = self._plans.read()
        self._next_number = max(plans, default=-1) + 1
        self._newest = {line.custom_id: line for plan in plans.values() for line in plan.lines}
        there = set(run.store.list(DATA))
        self._missing = {number: plan for number, plan in plans.items() if self._name(number) not in there}

    @classmethod
    def of(cls, run: Run, epoch: int, check: Callable[[], None]) -> Self | None:
        """The shards of a run; None if it was not asked for any."""
        settings = shard_settings(run.store)
        return None if settings is None else cls(run, settings, epoch, check)

    def catch_up(self, is_end: bool, max_bytes: int = MAX_BYTES) -> tuple[list[WrittenShard], int]:
        """Write what is planned and missing, then what can be filled; also the number of rows that wait.

        At the end of a run nothing waits: lines of jobs that have failed come, and the last shard may be smaller.
        Raises StoreError, RunError, and what `check` raises.
        """
        written = [shard for number in list(self._missing) if (shard := self._completed(number)) is not None]
        full, num_waiting = packed(self._due(is_end), self._settings.rows_per_shard, is_end, max_bytes)
        return written + [shard for lines in full if (shard := self._added(lines)) is not None], num_waiting

    def _due(self, is_end: bool) -> Iterator[SizedLine]:
        """Lines that have ended otherwise than they are planned, in input order."""
        sizes, failed = self._run.ended_sizes()
        failures = self._failures(failed) if is_end else {}
        for custom_id, choices in self._lines.items():
            jobs = []
            for lineage in choices:
                if lineage[-1] in sizes or lineage[-1] in failures:
                    jobs.append(newest_with(lineage, sizes) or lineage[-1])
            line = self._planned(custom_id, jobs, failures) if len(jobs) == len(choices) else None
            if line is not None:
                num_bytes = (sizes.get(job_id, 0) + len(self._records[job_id].job.prompt or "") for job_id in jobs)
                yield SizedLine(line, sum(num_bytes))

    def _failures(self, failed: set[str]) -> dict[str, Failure]:
        """The reasons why jobs failed, for those whose errors can be read."""
        job_ids = sorted(failed)
        lines = zip(job_ids, self._run.error_lines(job_ids), strict=True)
        return {
            job_id: Failure(code=plain(line["error"]["code"]), message=plain(line["error"]["message"]))
            for job_id, line in lines
            if line is not None
        }

    def _planned(self, custom_id: str, jobs: Sequence[str], failures: dict[str, Failure]) -> PlannedLine | None:
        """The line as it has ended now; None where it is in a shard so."""
        before = self._newest.get(custom_id)
        own = {job_id: failures[job_id] for job_id in jobs if job_id in failures}
        revision = 0 if before is None else before.revision + 1
        line = PlannedLine(custom_id=custom_id, revision=revision, jobs=tuple(jobs), failures=own)
        return None if before is not None and before.key == line.key else line

    def _completed(self, number: int) -> WrittenShard | None:
        """Write a shard that was planned, as it was; None while one of its results is damaged: its job runs again."""
        plan = self._missing[number]
        with temporary_file() as file:
            return self._published(number, file) if self._fill(file, plan.lines) == plan.lines else None

    def _added(self, lines: Sequence[PlannedLine]) -> WrittenShard | None:
        """Plan and write a new shard of those lines whose results can be read; None where none can."""
        with temporary_file() as file:
            if not (readable := self._fill(file, lines)):
                return None
            number, self._next_number = self._next_number, self._next_number + 1
            self._missing[number] = Plan(lines=readable)
            self._newest |= {line.custom_id: line for line in readable}
            return self._published(number, file)

    def _published(self, number: int, file: BinaryIO) -> WrittenShard:
        plan, path, store = self._missing[number], f"{DATA}/{self._name(number)}", self._run.store
        self._plans.write(number, plan)
        self._check()
        store.write_new(f"{FOLDER}/README.md", card(self._settings.format).encode())
        store.write_new_from(path, file)
        del self._missing[number]
        return WrittenShard(path, sum(len(line.jobs) for line in plan.lines))

    def _fill(self, file: BinaryIO, lines: Sequence[PlannedLine]) -> tuple[PlannedLine, ...]:
        """Write the rows of those lines whose results can be read, and go back to the first; returns the lines."""
        readable = []

        def rows() -> Iterator[Row]:
            for line, found in self._rows(lines):
                if found is not None:
                    readable.append(line)
                    yield from found

        write_shard(file, self._settings.format, rows())
        file.seek(0)
        return tuple(readable)

    def _rows(self, lines: Sequence[PlannedLine]) -> Iterator[tuple[PlannedLine, list[Row] | None]]:
        """Each line with its rows; None where one of its results can't be read."""
        results = self._run.result_lines(
            [job_id for line in lines for job_id in line.jobs if job_id not in line.failures]
        )
        for line in lines:
            rows: list[Row] = []
            for job_id in line.jobs:
                record = self._records[job_id]
                if (failure := line.failures.get(job_id)) is not None:
                    rows.append(failed_row(record, line.revision, failure))
                elif (result := next(results)) is not None:
                    rows.append(finished_row(record, line.revision, result))
            yield line, rows if len(rows) == len(line.jobs) else None

    def _name(self, number: int) -> str:
        return f"train-{number:05d}.{self._settings.format}"
