"""The command `nightly`: a run per new job file of a folder."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import click

from swiftbatch.scheduler.commands.exit_codes import LIMIT_REACHED, SOME_FAILED
from swiftbatch.scheduler.commands.options.launch_options import check_engine, runs_options
from swiftbatch.scheduler.commands.options.option_types import GroupedCommand
from swiftbatch.scheduler.commands.submit import submit
from swiftbatch.scheduler.display.progress_line import counted, printable
from swiftbatch.scheduler.process.signals import INTERRUPTED
from swiftbatch.scheduler.process.streams import Lines

if TYPE_CHECKING:
    from swiftbatch.jobs.storage.store import Store

MARK = "job-file.json"


@click.command(cls=GroupedCommand)
@click.argument("inbox")
@runs_options("Folder of the runs", "nightly")
@click.pass_context
def nightly(context: click.Context, /, inbox: str, runs_uri: str, if_busy: str, **options: Any) -> None:
    """Run all job files below a folder one by one, each as `submit` would. Files that were run are skipped.

    INBOX is a path, s3:// or gs://; job files are *.jsonl, *.jsonl.gz, *.jsonl.zst and *.parquet. The file `a/b.jsonl`
    becomes the run `a/b.jsonl` in the folder of runs. A file is skipped as long as its bytes have not changed; for a
    changed one, the missing jobs run.

    \b
    Exit code: as for `submit`, over all files that were run; also 1 if a file or folder could not be read or run.
    All limits but the deadline are per run. A file whose run stopped at a limit is continued the next time.

    \b
    Example:
      swiftbatch nightly s3://bucket/inbox --runs s3://bucket/runs --workers 2
    """
    from swiftbatch.jobs.input.reader import job_files_in
    from swiftbatch.jobs.storage.store import Store
    from swiftbatch.scheduler.runs.folder_lock import hold

    check_engine(options)
    inbox_store, runs = Store(inbox), Store(runs_uri)
    _check_folders(inbox_store, runs)
    with hold(runs, if_busy == "wait", "nightly") as held:
        paths, skipped = job_files_in(inbox_store)
        digests = _without_done(inbox_store, runs, paths, skipped)
        Lines(sys.stderr).write(
            f"{counted(len(paths), 'job file')} in {printable(inbox_store.shown_uri)}, {len(digests)} of them to run"
        )
        for path, reason in sorted(skipped.items()):
            Lines(sys.stderr).write(f"{printable(path)} was not read: {printable(reason)}")
        code = SOME_FAILED if skipped else 0
        for number, (path, digest) in enumerate(digests.items()):
            held.check()
            if options["deadline"] is not None and options["deadline"].has_passed():
                Lines(sys.stderr).write(f"the deadline has passed; job files left: {len(digests) - number}")
                code = max(code, LIMIT_REACHED)
                break
            code = max(code, _run_file(context, inbox, runs_uri, path, digest, options))
            if code == INTERRUPTED:
                break
    context.exit(code)


# the options of `submit` except those for one file and one run
nightly.params += [option for option in submit.params if option.name not in ("jobs", "run_uri")]


def _run_file(
    context: click.Context, inbox: str, runs_uri: str, path: str, digest: str, options: dict[str, Any]
) -> int:
    """Mark a finished job file; return the exit code."""
    from swiftbatch.jobs.input.job_files import InputFileError, joined
    from swiftbatch.jobs.json_records import dump_line
    from swiftbatch.jobs.run.run_records import RunError
    from swiftbatch.jobs.storage.store import Store
    from swiftbatch.scheduler.runs.submission import StrictError

    run_uri = joined(runs_uri, path)
    Lines(sys.stderr).write(f"job file {printable(path)}")
    try:
        context.invoke(submit, jobs=(joined(inbox, path),), run_uri=run_uri, **options)
        code = 0
    except click.exceptions.Exit as ended:
        code = ended.exit_code
    except (InputFileError, RunError, StrictError) as error:  # one file's error; continue with the others
        Lines(sys.stderr).write(f"{printable(path)} was not run: {printable(str(error))}")
        return SOME_FAILED
    if code not in (INTERRUPTED, LIMIT_REACHED):
        Store(run_uri).write(MARK, dump_line({"job_file": path, "sha256": digest}))
    return code


def _without_done(inbox: Store, runs: Store, paths: list[str], skipped: dict[str, str]) -> dict[str, str]:
    """Return new or changed files with digests; unreadable local files go to `skipped`."""
    from swiftbatch.jobs.input.reader import digest_of
    from swiftbatch.jobs.storage.store import StoreError

    digests = {}
    for path in paths:
        try:
            digest = digest_of(inbox, path)
        except StoreError as error:
            if not inbox.is_local:
                raise
            skipped[path] = str(error)
            continue
        if _done_digest(runs, path) != digest:
            digests[path] = digest
    return digests


def _done_digest(runs: Store, path: str) -> str | None:
    """Return None without a readable mark."""
    from swiftbatch.jobs.run.run_records import RunError, read_object

    try:
        return (read_object(runs, f"{path}/{MARK}") or {}).get("sha256")
    except RunError:
        return None


def _check_folders(inbox: Store, runs: Store) -> None:
    """Refuse a folder inside the other, which would mix outputs and job files."""
    places = [f"{store.uri.partition('?')[0].rstrip('/')}/" for store in (inbox, runs)]
    if places[0].startswith(places[1]) or places[1].startswith(places[0]):
        raise click.UsageError(
            f"--runs {runs.shown_uri}: found one of the folders inside the other ({inbox.shown_uri}), "
            "expected two beside each other"
        )
    if inbox.is_local and not os.path.isdir(inbox.uri):
        raise click.UsageError(f"no folder at {inbox.shown_uri}: expected one with job files")
