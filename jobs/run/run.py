"""One run folder, readable with `ls` and `cat`."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import tee
from typing import TYPE_CHECKING, Any, BinaryIO

from pydantic import TypeAdapter

from swiftbatch.jobs.input.job_files import run_folder_of
from swiftbatch.jobs.input.rejects import Reject, Rejects
from swiftbatch.jobs.job import JobRecord
from swiftbatch.jobs.json_records import dump_line
from swiftbatch.jobs.run import job_table
from swiftbatch.jobs.run.error_files import LineFiles, LinePlace, parsed_line, read_lines, written_line
from swiftbatch.jobs.run.job_table import (
    BODY,
    LATER_COLUMN,
    JobBodies,
    lineages,
    longest_job,
    newest_with,
    read_parts,
    read_records,
)
from swiftbatch.jobs.run.output import ended_lines, joined, with_kept, write_output
from swiftbatch.jobs.run.output_line import num_completion_tokens
from swiftbatch.jobs.run.output_table import EndedLine
from swiftbatch.jobs.run.result_files import SEGMENTS, ResultFiles, ResultSegment
from swiftbatch.jobs.run.run_records import (
    Progress,
    RunError,
    RunManifest,
    pretty,
    read_model,
    read_parsed,
)
from swiftbatch.jobs.storage.retries import Retries
from swiftbatch.jobs.storage.store import Store, StoreError, at_hand, spool

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    from swiftbatch.jobs.run.job_index import JobIndex


MANIFEST = "run.json"
REJECTS = "rejects.jsonl"
PROGRESS = "progress.json"
PRIORITIES = "priorities.json"
CANCEL_RUN = "cancel/run.json"
CANCEL_JOBS = "cancel/jobs"
NAMED_NUMBERS = TypeAdapter(dict[str, int])


class Run:
    """A run in its folder. Methods raise `StoreError`, and `RunError` for a damaged file."""

    def __init__(self, store: Store, manifest: RunManifest | None) -> None:
        """`manifest` is None if damaged."""
        self.store = store
        self.manifest = RunManifest.model_construct() if manifest is None else manifest
        self._run_id = None if manifest is None else manifest.run_id
        self._fingerprint = None if manifest is None else manifest.fingerprint
        self.damaged: dict[str, str] = {}  # unusable files seen so far: path and problem
        self._results = ResultFiles(store, self.damaged, self._fingerprint)
        self._errors = LineFiles(store, "errors", self.damaged, self._fingerprint)

    @classmethod
    def planned(cls, uri: str, manifest: RunManifest, retries: Retries | None = None) -> Run:
        """Open the run at `uri`, or plan a new run from `manifest`, which only `made` writes.

        Raises `RunError` if it has another model or dtype.
        """
        store = Store(uri, retries)
        if store.exists(MANIFEST):
            return cls.open(uri, retries)._fit_for(manifest)
        strangers = {"results", "errors", "checkpoints", "output.jsonl", job_table.FIRST} & set(store.list(""))
        if strangers:
            found = ", ".join(sorted(strangers))
            raise RunError(f"{store.shown_uri} holds {found} but no {MANIFEST}: expected a run or a new folder")
        return cls(store, manifest)

    def made(self) -> Run:
        """Write a planned run and return it. Raises as `planned` does."""
        self.store.write_new(MANIFEST, pretty(self.manifest))
        found = read_model(self.store, MANIFEST, RunManifest)
        return self if found is None else Run(self.store, found)._fit_for(self.manifest)

    @classmethod
    def open(cls, uri: str, retries: Retries | None = None) -> Run:
        """Open the run. Raises `RunError` if absent or of another version."""
        store = Store(uri, retries)
        _refuse_file(store)
        manifest = read_model(store, MANIFEST, RunManifest)
        if manifest is None:
            raise RunError(f"no run at {store.shown_uri}: expected {MANIFEST} there; `swiftbatch submit` makes one")
        return cls(store, manifest)

    def add_jobs(self, records: Iterable[JobRecord]) -> None:
        """Append the jobs that the run lacks, in order."""
        known = {job_id for lineage in self.lineages() for job_id in lineage}

        def new() -> Iterator[JobRecord]:
            for record in records:
                if record.job_id not in known:
                    known.add(record.job_id)
                    yield record

        with spool() as table:
            if job_table.write_records(table, new(), self.manifest.run_id):
                self.add_table(table)

    def add_table(self, table: BinaryIO) -> None:
        """Append a table of jobs that the run lacks."""
        table.seek(0)
        job_table.add(self.store, table)

    def parts(self, *names: str) -> Iterator[pa.Table]:
        return read_parts(self.store, names, self._run_id)

    def records(self) -> Iterator[JobRecord]:
        """Yield the latest version of every job, holding only one part of the tables in memory at a time."""
        import numpy as np

        places = self.job_index().places
        is_moved = places > np.minimum.accumulate(places[::-1])[::-1]  # moved to an earlier job's place
        moved = np.sort(places[is_moved])
        found = dict(zip(moved.tolist(), read_records(self.store, moved, self._run_id), strict=True))
        rest = read_records(self.store, places[~is_moved], self._run_id)
        return (found[place] if place in found else next(rest) for place in places.tolist())

    def jobs(self) -> list[JobRecord]:
        return list(self.records())

    def records_at(self, places: NDArray[np.int64]) -> Iterator[JobRecord]:
        return read_records(self.store, places, self._run_id)

    def job_index(self) -> JobIndex:
        from swiftbatch.jobs.run.job_index import COLUMNS, JobIndex

        return JobIndex.of(self.parts(*COLUMNS))

    def job_bodies(self, places: NDArray[np.int64], names: Sequence[str] = BODY) -> JobBodies:
        return JobBodies(self.parts(*names), places)

    def longest_job(self) -> int:
        """Read the longest job's positions from metadata."""
        return longest_job(self.store, self._run_id)

    def all_jobs(self) -> dict[str, JobRecord]:
        """Return all jobs by id, also superseded jobs."""
        import numpy as np

        num_rows = sum(map(len, self.parts("job_id")))
        places = np.arange(num_rows, dtype=np.int64)
        return {record.job_id: record for record in read_records(self.store, places, self._run_id)}

    def job_ids(self) -> list[str]:
        """Return the ids of the latest version of every job, in input order."""
        from swiftbatch.jobs.run.job_index import JobIndex

        names = ("job_id", "supersedes")
        return list(JobIndex.of(self.parts(*names), names).job_ids())

    def all_job_ids(self) -> pa.ChunkedArray:
        """Return all ids, also those of superseded jobs."""
        import pyarrow as pa

        parts = self.parts("job_id")
        return pa.chunked_array([chunk for part in parts for chunk in part.column("job_id").chunks], pa.string())

    def lineages(self) -> list[list[str]]:
        parts = self.parts("job_id", "supersedes")
        rows = (zip(*(column.to_pylist() for column in part.columns), strict=True) for part in parts)
        return lineages(pair for pairs in rows for pair in pairs)

    def extended(self) -> dict[str, list[str]]:
        """Return the lineages of extended jobs, by their newest ids."""
        supersedes = (part.column("supersedes") for part in self.parts("supersedes"))
        is_extended = any(column.null_count < len(column) for column in supersedes)
        return {lineage[-1]: lineage for lineage in self.lineages() if len(lineage) > 1} if is_extended else {}

    def custom_ids(self) -> set[str]:
        parts = self.parts("custom_id")
        return {name for part in parts for name in part.column("custom_id").to_pylist()}

    def priorities(self) -> dict[str, int]:
        """Return the priorities that are not 0 by `custom_id`; none if the file is damaged. Lower ones begin first."""
        try:
            return read_parsed(self.store, PRIORITIES, NAMED_NUMBERS.validate_json) or {}
        except RunError:
            return {}

    def set_priorities(self, custom_ids: Iterable[str], priorities: Mapping[str, int]) -> None:
        """Set the priorities of a submission's lines, which affect no token; other lines keep theirs."""
        before = self.priorities()
        if not before and not priorities:
            return
        now = before | {name: priorities.get(name, 0) for name in custom_ids if name in before or name in priorities}
        now = {custom_id: priority for custom_id, priority in now.items() if priority}
        if now != before:
            self.store.write(PRIORITIES, NAMED_NUMBERS.dump_json(now, indent=1) + b"\n")

    def write_rejects(self, rejects: Iterable[Reject]) -> None:
        """Replace the rejects of earlier submissions."""
        with spool() as file:
            for reject in rejects:
                file.write(dump_line(asdict(reject)))
            file.seek(0)
            self.store.write_from(REJECTS, file)

    def rejects(self) -> Rejects:
        """Return the newest submission's rejects, or no rejects if the file is damaged."""
        with at_hand(self.store, REJECTS) as file:
            try:
                return Rejects() if file is None else Rejects.read(file)
            except (ValueError, TypeError, RecursionError):
                self.damaged[REJECTS] = "found no list of rejected lines"
                return Rejects()

    def lacks_its_jobs(self) -> bool:
        """Return whether the only submission ended before it wrote jobs."""
        return not self.store.exists(REJECTS) and not self.job_ids()

    def write_segment(self, name: str, segment: ResultSegment) -> None:
        """Write a new segment of results, all or none."""
        self._results.write_segment(name, segment)

    def write_error(self, job_id: str, line: dict[str, Any]) -> None:
        self._errors.write(job_id, line)

    def write_errors(self, lines: Iterable[tuple[str, dict[str, Any]]]) -> None:
        self._errors.write_all(lines)

    def ended(self) -> tuple[set[str], set[str]]:
        """Return the ids of jobs with a result, and the ids of jobs with only an error."""
        finished, failed = self.ended_sizes()
        return set(finished), failed

    def ended_sizes(self) -> tuple[dict[str, int], set[str]]:
        """Return what `ended` does, with the bytes of each result."""
        finished = self._results.sizes()
        return finished, self._errors.job_ids().difference(finished)

    def result(self, job_id: str) -> dict[str, Any] | None:
        return self._results.read(job_id)

    def error(self, job_id: str) -> dict[str, Any] | None:
        return self._errors.read(job_id)

    def errors(self, job_ids: Iterable[str]) -> Iterator[dict[str, Any]]:
        return (line for line in self.error_lines(job_ids) if line is not None)

    def error_lines(self, job_ids: Iterable[str]) -> Iterator[dict[str, Any] | None]:
        return self._errors.read_all(job_ids)

    def result_lines(self, job_ids: Iterable[str]) -> Iterator[dict[str, Any] | None]:
        return self._results.read_all(job_ids)

    def output_lines(self) -> Iterator[tuple[JobRecord, dict[str, Any] | None]]:
        return self._lines({})

    def lines_of(self, index: JobIndex) -> Iterator[dict[str, Any] | None]:
        """Yield the output line of each job, or None for a job that has no line yet."""
        return self._read_places(self._output_places(index.job_ids(), {}))

    def finished_ids(self) -> Container[str]:
        return self._results.job_ids()

    def ended_jobs(self, index: JobIndex) -> tuple[array[int], dict[int, str]]:
        """Return the token counts of finished rows, and the error codes of failed rows."""
        whole = self._results.whole()
        finished, failed = self.ended()
        rows, codes, others = array("q"), dict[int, str](), list[tuple[int, str]]()
        for row, job_id in enumerate(index.job_ids()):
            if job_id in whole:
                rows.extend((row, whole[job_id]))
            elif job_id in finished or job_id in failed:
                others.append((row, job_id))
        places = (self._place(job_id, finished) for _, job_id in others)
        for (row, _), line in zip(others, self._read_places(places), strict=True):
            if line is not None and line["error"] is None:
                rows.extend((row, num_completion_tokens(line)))
            elif line is not None:
                codes[row] = line["error"]["code"]
        return rows, codes

    def ended_lines(self) -> Iterator[EndedLine]:
        """Yield the jobs of each input line that has ended.

        An extended job without a new line has the line of its earlier version.
        """
        return ended_lines(self._lines(self.extended()))

    def joined_lines(self) -> Iterator[dict[str, Any]]:
        return map(joined, self.ended_lines())

    def written_lines(self) -> Iterator[bytes]:
        """Yield `joined_lines` as `dump_line` writes them; without choices no job is read."""
        import numpy as np

        from swiftbatch.jobs.run.job_index import JobIndex

        names = ("job_id", "supersedes", "num_choices")
        index = JobIndex.of(self.parts(*names), names)
        if (index.columns["num_choices"] > 1).any():
            return map(dump_line, self.joined_lines())
        places = self._output_places(index.job_ids(), self.extended())
        write = partial(written_line, damaged=self.damaged, fingerprint=self._fingerprint)
        lines = read_lines(self._results.data, places, write, self._results.elsewhere)
        kept = self.job_bodies(np.sort(index.places), (LATER_COLUMN,))
        own = zip(lines, index.places.tolist(), strict=True)
        return (with_kept(line, kept.at(place)) for line, place in own if line is not None)

    def _lines(self, extended: Mapping[str, list[str]]) -> Iterator[tuple[JobRecord, dict[str, Any] | None]]:
        records, again = tee(self.records())
        places = self._output_places((record.job_id for record in again), extended)
        return zip(records, self._read_places(places), strict=True)

    def _output_places(self, job_ids: Iterable[str], extended: Mapping[str, list[str]]) -> Iterator[LinePlace | None]:
        """Yield places for `_lines`."""
        finished, failed = self.finished_ids(), self._errors.job_ids()

        def place(job_id: str) -> LinePlace | None:
            known = (newest_with(extended[job_id], finished) or job_id) if job_id in extended else job_id
            return self._place(known, finished) if known in finished or job_id in failed else None

        return map(place, job_ids)

    def _place(self, job_id: str, finished: Container[str]) -> LinePlace | None:
        return (self._results if job_id in finished else self._errors).place(job_id)

    def _read_places(self, places: Iterable[LinePlace | None]) -> Iterator[dict[str, Any] | None]:
        parse = partial(parsed_line, damaged=self.damaged, fingerprint=self._fingerprint)
        return read_lines(self._results.data, places, parse, self._results.elsewhere)

    def result_file(self, job_id: str) -> str:
        place = self._results.place(job_id)
        return "" if place is None else place.path

    def set_damaged_aside(self, job_ids: Sequence[str]) -> list[tuple[str, str, str]]:
        """Move damaged results and errors away; return old path, problem and new path."""
        return [*self._results.set_damaged_aside(), *self._errors.set_damaged_aside(job_ids)]

    def delete_leftovers(self) -> None:
        """Delete half-written files; only the run's holder may call this."""
        for folder in (
            "",
            job_table.LATER,
            "results",
            SEGMENTS,
            "errors",
            "tokens",
            "shards",
            "shards/data",
            "shard-plans",
        ):
            self.store.delete_leftovers(folder)
        self.store.delete_leftovers("drivers", min_age_seconds=60)  # others may be trying to take the run

    def clear_errors(self) -> set[str]:
        """Make failed and cancelled jobs pending again; return their ids."""
        job_ids = self._errors.job_ids()
        for job_id in job_ids:
            self._errors.delete(job_id)
        return job_ids

    def write_progress(self, progress: Progress) -> None:
        self.store.write(PROGRESS, pretty(progress))

    def progress(self) -> Progress | None:
        """Return the newest heartbeat, if usable."""
        self.damaged.pop(PROGRESS, None)
        try:
            return read_model(self.store, PROGRESS, Progress)
        except RunError:
            self.damaged[PROGRESS] = "found no heartbeat of a driver"
            return None

    def has_begun(self) -> bool:
        """Return whether a job has left tokens or an end here, which bind the run to its settings."""
        return any(self.store.list(folder) for folder in ("tokens", "checkpoints", "results", "errors"))

    def with_other_settings(self, manifest: RunManifest) -> Run:
        """Replace the manifest; only the run's holder may call this, and only before the run has begun."""
        self.store.write(MANIFEST, pretty(manifest))
        return Run(self.store, manifest)

    def has_had_a_driver(self) -> bool:
        return self.store.exists(PROGRESS)

    def request_cancel(self, job_id: str | None) -> None:
        """Request to cancel one job, or the whole run if `job_id` is None."""
        path = CANCEL_RUN if job_id is None else f"{CANCEL_JOBS}/{job_id}.json"
        self.store.write(path, dump_line({"requested": time.time()}))

    def cancel_requests(self) -> tuple[bool, set[str]]:
        """Return whether to cancel the run, and the ids of jobs to cancel."""
        names = self.store.list(CANCEL_JOBS)
        return self.store.exists(CANCEL_RUN), {name.removesuffix(".json") for name in names if name.endswith(".json")}

    def clear_cancel(self) -> None:
        self.store.delete_folder("cancel")

    def write_output(self, check: Callable[[], None] = lambda: None) -> None:
        """Write both output files. Calls `check` before it replaces anything."""
        write_output(self.store, self.ended_lines(), check)

    def refuse_other_model(
        self,
        model_fingerprint: str,
        text_fingerprint: str,
        files: Mapping[str, str],
        commit: str | None,
    ) -> None:
        """Raise `RunError` if the model changed, because its tokens would differ.

        `files` has the SHA-256 of each file found.
        """
        shown, known = f"model {self.manifest.stored_model}", self.manifest.model_files
        differing = [name for name in known if known[name] != files.get(name)]
        of_commit = "" if commit is None else f" of commit {commit}"
        found = f" ({differing[0]}{of_commit} is another)" if differing else ""
        self._refuse_other("model_fingerprint", shown, model_fingerprint, found)
        shown += ", with another chat template or another file of its tokenizer"
        self._refuse_other("text_fingerprint", shown, text_fingerprint, found)

    def refuse_other_adapters(self, files: Mapping[str, Mapping[str, str]]) -> None:
        """Raise `RunError` if adapters changed; `files` has the SHA-256 of each file found, by their names."""
        for name, known in self.manifest.lora_files.items():
            changed = [file for file, digest in known.items() if files.get(name, {}).get(file) != digest]
            if changed:
                raise RunError(
                    f"the run at {self.store.shown_uri} was made with another adapter {name} ({changed[0]} is "
                    "another); put its files back, or use another run folder"
                )

    def _fit_for(self, manifest: RunManifest) -> Run:
        self.refuse_other_adapters(manifest.lora_files)
        self.refuse_other_model(
            manifest.model_fingerprint, manifest.text_fingerprint, manifest.model_files, manifest.model_commit
        )
        for name in ("dtype", "kv_dtype"):
            here, asked = getattr(self.manifest, name), getattr(manifest, name)
            if here != asked and (self.manifest.run_id != manifest.run_id or self.has_begun()):
                self._refuse_other(name, f"{name} {here}", asked)
        return self

    def _refuse_other(self, field: str, shown: str, asked: str | None, found: str = "") -> None:
        here = getattr(self.manifest, field)
        if here != asked:
            raise RunError(
                f"the run at {self.store.shown_uri} was made with {shown}: expected {field} {here}, found {asked}"
                f"{found}; use the same one, or another run folder"
            )


def _refuse_file(store: Store) -> None:
    """Raise StoreError for a file, such as a job file, in place of a run."""
    if store.is_local and os.path.isfile(store.uri):
        beside = run_folder_of(store.shown_uri)
        is_there = os.path.isfile(os.path.join(run_folder_of(store.uri), MANIFEST))
        hint = f"its run is {beside}" if is_there else f"`swiftbatch submit {store.shown_uri}` makes a run of it"
        raise StoreError(f"{store.shown_uri} is a file, expected a run's folder; {hint}")
