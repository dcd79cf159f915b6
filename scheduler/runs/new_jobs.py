"""Adds the jobs of a submission that a run does not have yet, and refuses lines that it knows otherwise."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from numpy.typing import NDArray

from swiftbatch.jobs.input.reader import Reject
from swiftbatch.jobs.run.job_index import COLUMNS, JobIndex
from swiftbatch.jobs.run.job_table import table_schema, write_tables
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.table_parts import parts_of
from swiftbatch.jobs.storage.spool import spool

if TYPE_CHECKING:
    import pyarrow as pa

CHANGED = "field 'custom_id': this run has it with another prompt or sampling; use a new custom_id or a new run"


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
