"""Puts job files into a run folder: reads them, counts prompt tokens, refuses what can't run, adds the rest."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from numpy.typing import NDArray

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.garbage_collection import looked_for_seldom
from swiftbatch.jobs.input.line_parsing import JobLine
from swiftbatch.jobs.input.parquet_rows import Columns
from swiftbatch.jobs.input.reader import JobReader
from swiftbatch.jobs.input.rejects import Reject, Rejects
from swiftbatch.jobs.job import JobUrl
from swiftbatch.jobs.repetition import loop_guard
from swiftbatch.jobs.run.job_index import COLUMNS, JobIndex
from swiftbatch.jobs.run.job_table import table_schema, write_records, write_tables
from swiftbatch.jobs.run.job_table_parts import parts_of
from swiftbatch.jobs.run.priorities import set_priorities
from swiftbatch.jobs.run.run import Run, RunError, RunManifest
from swiftbatch.jobs.shards.shard_settings import ask_for_shards
from swiftbatch.jobs.storage.temporary_files import spool
from swiftbatch.scheduler.driver.run_lock import Hold
from swiftbatch.scheduler.runs.default_settings import Settings
from swiftbatch.scheduler.runs.fixed_settings import (
    computation_of,
    kept_or_new_manifest,
    with_markers,
    with_model,
    with_rows,
)
from swiftbatch.scheduler.runs.job_file_folders import job_lines
from swiftbatch.scheduler.runs.prompt_checks import LineNotes, make_records
from swiftbatch.worker.caches.cache_room import (
    MEMORY,
    KVRoom,
    bytes_per_position,
    check_folder,
    held_of,
    place_of_caches,
    state_bytes,
)
from swiftbatch.worker.drafters.catalogue import engine_entry
from swiftbatch.worker.model.model_files import ModelFiles, locate_model, read_config
from swiftbatch.worker.model.tokenizer import NO_MARKERS, TextCodec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import pyarrow as pa

CHANGED = "field 'custom_id': this run has it with another prompt or sampling; use a new custom_id or a new run"

NO_COLUMNS = Columns()


class StrictError(UserError):
    """A file with rejects was submitted with `--strict`."""

    def __init__(self, path: str, rejects: Sequence[Reject]) -> None:
        first = rejects[0]
        place = first.place if first.file is not None else f"{path}, {first.place}"
        refusal = "--strict refuses the file, nothing was submitted"
        super().__init__(f"{place}: {first.reason} (rejected lines: {len(rejects)}; {refusal})")


@dataclass(frozen=True)
class Submission:
    """A run that is held, the files' jobs in it, and what was refused.

    `without_effect` has the fields that change nothing here, and how many good lines have each.
    """

    run: Run
    hold: Hold
    jobs: JobIndex
    rejects: Rejects
    without_effect: dict[str, int]


@contextmanager
def submission(
    jobs: str | Sequence[str],
    run_uri: str,
    settings: Settings,
    is_strict: bool = False,
    may_take_over: bool = False,
    columns: Columns = NO_COLUMNS,
    endpoint: JobUrl | None = None,
) -> Iterator[Submission]:
    """Add the jobs of one file or of several to the run at `run_uri`, which is made if there is none.

    `jobs` are paths, URIs or patterns, see `found_files`; the jobs are those of the first file, then of the next.
    With an `endpoint`, lines for another one are rejects.
    The run is held from before the first change in its folder until the block ends. Raises InputFileError, KVRoomError
    (for the folder of `--kv-offload`), StrictError, ModelError, RunError (RunTakenError while a driver holds it, see
    `refuse_if_taken`) and StoreError, each with one line for the user; then no job of the file is in the run.
    """
    manifest = kept_or_new_manifest(run_uri, settings)
    is_for_gpus = not manifest.model_fingerprint and manifest.device != "cpu"  # a new run, or it has its rows
    said = [jobs] if isinstance(jobs, str) else jobs
    files = locate_model(manifest.stored_model)
    codec = TextCodec(files, manifest.thinking_markers, manifest.clock)
    manifest = with_markers(with_model(manifest, files), codec)
    reader, notes = JobReader(manifest.seed, columns, endpoint), LineNotes()
    lines = _bounded(job_lines(said, reader), reader, notes)
    if manifest.thinking_end == "close" and codec.markers is None:
        raise UserError(f"--thinking-end: found close, {NO_MARKERS}; leave the option away")
    room, guard = kv_room(manifest, files, settings), loop_guard(manifest.loop_guard)
    fitting = (manifest.max_tokens, room, guard, manifest.thinking_end)
    with spool() as table:
        with looked_for_seldom():
            write_records(table, make_records(lines, notes, files, codec, *fitting), manifest.run_id)
        if is_strict and (rejects := _in_order(reader, notes)):
            raise StrictError(said[0], rejects)
        if is_for_gpus:
            manifest = with_rows(manifest, files, JobIndex.of(parts_of(table, COLUMNS)), settings)
        planned = Run.planned(run_uri, manifest, settings.start_retries)
        with Hold(planned, may_take_over, forgets_cancel=True) as hold:
            run = _made(planned, manifest)
            if settings.shards is not None:
                ask_for_shards(run.store, settings.shards)
            added, changed = add_new(run, table)
            set_priorities(run.store, added.custom_ids(), notes.priorities)
            rejects = _in_order(reader, notes, changed)
            run.write_rejects(rejects)
            yield Submission(run, hold, added, rejects, dict(notes.without_effect))


def _bounded(
    lines: Iterable[tuple[int, JobLine]], reader: JobReader, notes: LineNotes
) -> Iterator[tuple[int, JobLine]]:
    for line in lines:
        reader.refuse_endless(notes.rejects)
        yield line


def _in_order(reader: JobReader, notes: LineNotes, changed: Iterable[Reject] = ()) -> Rejects:
    """All rejects by line, with their places."""
    some = heapq.merge(reader.rejects, notes.rejects, changed, key=lambda reject: reject.line_number)
    return Rejects(map(reader.placed, some))


def _made(planned: Run, manifest: RunManifest) -> Run:
    """The planned run, in its folder. Raises RunError where another command has made another one there."""
    run = planned.made()
    if run.manifest.run_id != manifest.run_id:
        raise RunError(f"the run at {run.store.shown_uri} was made by another command just now; submit once more")
    return run


def kv_room(manifest: RunManifest, files: ModelFiles, settings: Settings) -> KVRoom | None:
    """The place where this machine's workers keep caches; None if that can't be known here. Raises KVRoomError."""
    if settings.address is not None:
        return None
    computation = computation_of(manifest, settings)
    kv_offload = computation.kv_offload
    check_folder(kv_offload)
    place = place_of_caches(manifest.device, kv_offload)
    config = read_config(files.name, files.path)
    num_bytes = bytes_per_position(config, manifest.dtype, manifest.kv_dtype)
    if place is None or num_bytes is None:
        return None
    forgets = place == MEMORY and manifest.device == "cpu" and not engine_entry(computation.engine).reads_caches
    return KVRoom(place, num_bytes, state_bytes(config, manifest.dtype), held_of(config) if forgets else None)


def add_new(run: Run, table: BinaryIO) -> tuple[JobIndex, list[Reject]]:
    """Add the jobs of a table in a file that a run lacks; returns those that it has then, and the refused lines.

    A line whose `custom_id` the run knows with another prompt or sampling is refused: results would be ambiguous.
    """
    found = JobIndex.of(parts_of(table, COLUMNS))
    known = run.job_index()
    rejects = _changed(run, found, known) if len(known) else []
    refused = np.array([reject.line_number for reject in rejects], np.int64)
    is_kept = ~np.isin(found.columns["line_number"], refused)
    is_new = is_kept & ~_is_in(found.columns["job_id"], run.all_job_ids())
    if is_new.all():
        _add(run, table, len(found))
    else:
        with spool() as rest:
            _add(run, rest, write_tables(rest, _some_of(table, is_new), run.manifest.run_id))
    return found.some(np.flatnonzero(is_kept)), rejects


def _add(run: Run, table: BinaryIO, num_jobs: int) -> None:
    if num_jobs:
        run.add_table(table)


def _some_of(table: BinaryIO, is_wanted: NDArray[np.bool_]) -> Iterator[pa.Table]:
    import pyarrow as pa

    num_before = 0
    for part in parts_of(table, table_schema().names):
        yield part.filter(pa.array(is_wanted[num_before : num_before + len(part)]))
        num_before += len(part)


def _is_in(texts: pa.Array, others: pa.Array) -> NDArray[np.bool_]:
    from pyarrow import compute

    found: NDArray[np.bool_] = compute.is_in(texts, value_set=others.cast(texts.type)).to_numpy(zero_copy_only=False)
    return found


def _changed(run: Run, found: JobIndex, known: JobIndex) -> list[Reject]:
    """The lines of which the run has other jobs; those with their one job at its place are most of them."""
    from pyarrow import compute

    names = found.columns["custom_id"]
    rows = compute.index_in(names, value_set=known.columns["custom_id"]).fill_null(-1).to_numpy()
    same = known.columns["job_id"].take(compute.if_else(rows < 0, None, rows))
    is_same = compute.equal(found.columns["job_id"], same).fill_null(False).to_numpy(zero_copy_only=False)
    is_alone = (found.columns["num_choices"] == 1) & (known.columns["num_choices"][rows] == 1)
    doubtful = found.some(np.flatnonzero((rows >= 0) & ~(is_same & is_alone)))
    return _refused(run, doubtful, known) if len(doubtful) else []


def _refused(run: Run, doubtful: JobIndex, known: JobIndex) -> list[Reject]:
    newest = {job_id: lineage[-1] for lineage in run.lineages() for job_id in lineage}  # of jobs that were extended
    theirs = known.some(known.rows_of("custom_id", doubtful.columns["custom_id"].to_pylist()))
    ids_of: dict[str, set[str]] = defaultdict(set)
    for entry in theirs.entries():
        ids_of[entry.custom_id].add(entry.job_id)
    rejects = []
    for line_number, choices in groupby(doubtful.entries(), key=lambda entry: entry.line_number):
        entries = list(choices)
        own = {newest.get(entry.job_id, entry.job_id) for entry in entries}
        if ids_of[entries[0].custom_id] != own:
            rejects.append(Reject(line_number, entries[0].custom_id, CHANGED))
    return rejects
