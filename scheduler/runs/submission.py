"""Puts job files into a run folder: reads them, counts prompt tokens, refuses what can't run, adds the rest."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.input.columns import Columns
from swiftbatch.jobs.input.reader import JobReader, Reject
from swiftbatch.jobs.job import JobUrl
from swiftbatch.jobs.repetition import loop_guard
from swiftbatch.jobs.run.job_index import JobIndex
from swiftbatch.jobs.run.job_table import write_records
from swiftbatch.jobs.run.priorities import set_priorities
from swiftbatch.jobs.run.run import Run, RunError, RunManifest
from swiftbatch.jobs.shards.settings import ask_for_shards
from swiftbatch.jobs.storage.spool import spool
from swiftbatch.scheduler.driver.hold import Hold
from swiftbatch.scheduler.runs.job_files import job_lines
from swiftbatch.scheduler.runs.job_records import LineNotes, make_records
from swiftbatch.scheduler.runs.manifest import computation_of, kept_or_new_manifest, with_markers, with_model
from swiftbatch.scheduler.runs.new_jobs import add_new
from swiftbatch.scheduler.runs.settings import Settings
from swiftbatch.worker.caches.room import KVRoom, bytes_per_position, check_folder, place_of_caches, state_bytes
from swiftbatch.worker.model.files import ModelFiles, locate_model, read_config
from swiftbatch.worker.model.text import NO_MARKERS, TextCodec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

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
    rejects: list[Reject]
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
    said = [jobs] if isinstance(jobs, str) else jobs
    files = locate_model(manifest.model)
    codec = TextCodec(files, manifest.thinking_markers)
    manifest = with_markers(with_model(manifest, files), codec)
    reader, notes = JobReader(manifest.seed, columns, endpoint), LineNotes()
    said = [jobs] if isinstance(jobs, str) else jobs
    lines = job_lines(said, reader)
    if manifest.thinking_end == "close" and codec.markers is None:
        raise UserError(f"--thinking-end: found close, {NO_MARKERS}; leave the option away")
    room, guard = kv_room(manifest, files, settings), loop_guard(manifest.loop_guard)
    fitting = (manifest.max_tokens, room, guard, manifest.thinking_end)
    with spool() as table:
        write_records(table, make_records(lines, notes, files, codec, *fitting), manifest.run_id)
        rejects = [*reader.rejects, *notes.rejects]
        if rejects and is_strict:
            raise StrictError(said[0], [reader.placed(reject) for reject in _in_order(rejects)])
        planned = Run.planned(run_uri, manifest, settings.start_retries)
        with Hold(planned, may_take_over, forgets_cancel=True) as hold:
            run = _made(planned, manifest)
            if settings.shards is not None:
                ask_for_shards(run.store, settings.shards)
            added, changed = add_new(run, table)
            set_priorities(run.store, added.custom_ids(), notes.priorities)
            rejects = [reader.placed(reject) for reject in _in_order([*rejects, *changed])]
            run.write_rejects(rejects)
            yield Submission(run, hold, added, rejects, dict(notes.without_effect))


def _in_order(rejects: Iterable[Reject]) -> list[Reject]:
    return sorted(rejects, key=lambda reject: reject.line_number)


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
    kv_offload = computation_of(manifest, settings).kv_offload
    check_folder(kv_offload)
    place = place_of_caches(manifest.device, kv_offload)
    config = read_config(files.name, files.path)
    num_bytes = bytes_per_position(config, manifest.dtype, manifest.kv_dtype)
    if place is None or num_bytes is None:
        return None
    return KVRoom(place, num_bytes, state_bytes(config, manifest.dtype))
