"""Puts job files into a run folder: reads them, counts prompt tokens, refuses what can't run, adds the rest."""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.input.columns import Columns
from swiftbatch.jobs.input.reader import Reject
from swiftbatch.jobs.job import JobRecord, JobUrl
from swiftbatch.jobs.repetition import loop_guard
from swiftbatch.jobs.run.priorities import set_priorities
from swiftbatch.jobs.run.run import Run, RunError, RunManifest
from swiftbatch.jobs.shards.settings import ask_for_shards
from swiftbatch.scheduler.driver.hold import Hold
from swiftbatch.scheduler.runs.job_files import read_job_files
from swiftbatch.scheduler.runs.job_records import make_records
from swiftbatch.scheduler.runs.manifest import computation_of, kept_or_new_manifest, with_markers, with_model
from swiftbatch.scheduler.runs.settings import Settings
from swiftbatch.worker.caches.room import KVRoom, bytes_per_position, check_folder, place_of_caches
from swiftbatch.worker.model.files import ModelFiles, locate_model, read_config
from swiftbatch.worker.model.text import TextCodec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
    """A run that is held, with the files' jobs in it, and what was refused.

    `without_effect` has the fields that change nothing here, and how many good lines have each.
    """

    run: Run
    hold: Hold
    records: list[JobRecord]
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
    lines = read_job_files(said, manifest.seed, columns, endpoint)
    files = locate_model(manifest.model)
    codec = TextCodec(files, manifest.thinking_markers)
    manifest = with_markers(with_model(manifest, files), codec)
    guard = loop_guard(manifest.loop_guard)
    room = kv_room(manifest, files, settings)
    made = make_records(lines.jobs, files, codec, manifest.max_tokens, room, guard)
    rejects = sorted([*lines.rejects, *made.rejects], key=lambda reject: reject.line_number)
    if rejects and is_strict:
        raise StrictError(said[0], [lines.placed(reject) for reject in rejects])
    planned = Run.planned(run_uri, manifest, settings.start_retries)
    with Hold(planned, may_take_over, forgets_cancel=True) as hold:
        run = planned.made()
        if run.manifest.run_id != manifest.run_id:
            raise RunError(f"the run at {run.store.shown_uri} was made by another command just now; submit once more")
        if settings.shards is not None:
            ask_for_shards(run.store, settings.shards)
        records, changed = _without_changed(run, made.records)
        rejects = sorted([*rejects, *changed], key=lambda reject: reject.line_number)
        rejects = [lines.placed(reject) for reject in rejects]
        set_priorities(run.store, {r.job.custom_id: made.priorities.get(r.job.custom_id, 0) for r in records})
        run.add_jobs(records)
        run.write_rejects(rejects)
        yield Submission(run, hold, records, rejects, dict(made.without_effect))


def kv_room(manifest: RunManifest, files: ModelFiles, settings: Settings) -> KVRoom | None:
    """The place where this machine's workers keep caches; None if that can't be known here. Raises KVRoomError."""
    if settings.address is not None:
        return None
    kv_offload = computation_of(manifest, settings).kv_offload
    check_folder(kv_offload)
    place = place_of_caches(manifest.device, kv_offload)
    num_bytes = bytes_per_position(read_config(files.name, files.path), manifest.dtype, manifest.kv_dtype)
    return None if place is None or num_bytes is None else KVRoom(place, num_bytes)


def _without_changed(run: Run, records: list[JobRecord]) -> tuple[list[JobRecord], list[Reject]]:
    """Refuse lines whose `custom_id` the run knows with another prompt or sampling: results would be ambiguous."""
    known: dict[str, set[str]] = defaultdict(set)
    for record in run.jobs():
        known[record.job.custom_id].add(record.job_id)
    newest = {job_id: lineage[-1] for lineage in run.lineages() for job_id in lineage}  # of jobs that were extended
    reason = "field 'custom_id': this run has it with another prompt or sampling; use a new custom_id or a new run"
    kept, rejects = [], []
    for line_number, group in groupby(records, key=lambda record: record.line_number):
        choices = list(group)
        custom_id = choices[0].job.custom_id
        job_ids = {newest.get(record.job_id, record.job_id) for record in choices}
        if known.get(custom_id, job_ids) == job_ids:
            kept += choices
        else:
            rejects.append(Reject(line_number, custom_id, reason))
    return kept, rejects
