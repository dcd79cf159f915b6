"""Commands that run jobs: submit, resume, cancel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from scheduler.commands.launch_options import launch_options, make_launch_options, output_mode
from scheduler.commands.model_options import MAX_THREADS, filled
from scheduler.process.interruption import INTERRUPTED
from worker.drafters.names import DEFAULT_ENGINE, ENGINE_NAMES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.input.reader import Reject
    from jobs.run.run import Run
    from scheduler.display.display import Display
    from scheduler.driver.hold import Hold
    from scheduler.runs.launch import LaunchOptions, Outcome

SOME_FAILED = 1
START_RETRY_SECONDS = 10.0  # for a store that fails before anything runs: a wrong address should show soon


@click.command()
@click.argument("jobs", type=click.Path())
@click.option("--run", "run_uri", required=True, help="Folder of the run: a path, s3:// or gs://. Made if absent.")
@click.option("--model", callback=filled, help="`embedded`, a folder, or a hub id. [default: embedded]")
@click.option(
    "--engine", type=click.Choice(ENGINE_NAMES), help=f"Changes speed, not output. [default: {DEFAULT_ENGINE}]"
)
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), help="[default: bfloat16]")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), help="[default: auto]")
@click.option(
    "--threads", type=click.IntRange(1, MAX_THREADS), help="CPU threads per worker. [default: cores / workers]"
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), help="For jobs without a seed of their own. [default: 0]")
@click.option("--strict", is_flag=True, help="Refuse the whole file if one line is bad.")
@launch_options
def submit(
    jobs: str, run_uri: str, threads: int | None, strict: bool, quiet: bool, as_json: bool, **options: Any
) -> None:
    """Run the jobs of a JSONL file and wait for them. The same file again runs only what is missing.

    JOBS holds one JSON object a line: `custom_id`, `prompt` (or `messages`), `max_tokens` and sampling fields, or an
    OpenAI Batch line. It may be compressed (gzip, zstd), in an object store, a pipe, or `-` for standard input.

    \b
    Exit code: 0 all jobs finished, 1 some failed or were rejected, 130 interrupted,
    2 wrong usage or input, or the run had to stop: then `swiftbatch resume` goes on.

    \b
    Example:
      swiftbatch submit jobs.jsonl --run my-run --workers 2
    """
    from jobs.storage.retries import Retries
    from scheduler.display.display import open_display
    from scheduler.runs.settings import Settings
    from scheduler.runs.submission import submission

    mode = output_mode(quiet, as_json)
    settings = Settings(
        **{name: options.pop(name) for name in ("model", "engine", "dtype", "device", "seed")},
        draft_model=options["draft_model"],
        kv_offload=options["kv_offload"],
        num_threads=threads,
        num_workers=options["workers"],
        address=options["address"],
        retries=Retries(min(START_RETRY_SECONDS, options["store_retry_seconds"])),
    )
    may_take_over = options.pop("may_take_over")
    with (
        open_display(mode) as display,
        submission(jobs, run_uri, settings, strict, may_take_over) as submitted,
    ):
        _tell_rejects(display, submitted.rejects)
        outcome = _launch(submitted.hold, len(submitted.records), make_launch_options(**options), display)
    _end(submitted.run, outcome, len(submitted.rejects), display)


@click.command()
@click.argument("run_uri", metavar="RUN")
@click.option("--retry-failed", is_flag=True, help="Also run the jobs again that failed or were cancelled.")
@click.option("--engine", type=click.Choice(ENGINE_NAMES), help="Another engine, same output. [default: the run's]")
@launch_options
def resume(run_uri: str, retry_failed: bool, quiet: bool, as_json: bool, **options: Any) -> None:
    """Go on with an interrupted run: every unfinished job continues from its checkpoint.

    Workers, their number and the engine may differ from those before: the output is the same.

    \b
    Example:
      swiftbatch resume my-run --workers 2
    """
    from jobs.run.run import Run
    from jobs.storage.retries import Retries
    from scheduler.display.display import open_display
    from scheduler.display.events import ErrorsCleared
    from scheduler.driver.hold import Hold
    from scheduler.driver.takeover import refuse_if_taken
    from scheduler.runs.settings import refuse_changed_model

    mode = output_mode(quiet, as_json)
    run = Run.open(run_uri, Retries(min(START_RETRY_SECONDS, options["store_retry_seconds"])))
    may_take_over = options.pop("may_take_over")
    refuse_if_taken(run, may_take_over)  # before a look at the model; the hold looks again
    refuse_changed_model(run)
    with open_display(mode) as display, Hold(run, may_take_over, forgets_cancel=retry_failed) as hold:
        if retry_failed:
            display.note(ErrorsCleared(run.clear_errors()))
        outcome = _launch(hold, len(run.job_ids()), make_launch_options(**options), display)
    _end(run, outcome, 0, display)


@click.command()
@click.argument("run_uri", metavar="RUN")
@click.argument("custom_id", required=False)
def cancel(run_uri: str, custom_id: str | None) -> None:
    """Cancel a run, or one job of it. Finished results stay; partial text stays readable with `tail`.

    \b
    Example:
      swiftbatch cancel my-run story-7
    """
    from jobs.run.run import Run
    from scheduler.display.summary import printable
    from scheduler.runs.cancellation import cancel_jobs

    click.echo(printable(cancel_jobs(Run.open(run_uri), custom_id)))


def _launch(hold: Hold, num_jobs: int, options: LaunchOptions, display: Display) -> Outcome:
    from scheduler.display.events import RunOpened
    from scheduler.runs.launch import launch

    run = hold.epoch.run
    display.note(RunOpened(run.store.shown_uri, run.manifest.run_id, num_jobs))
    return launch(hold, options, display)


def _tell_rejects(display: Display, rejects: Sequence[Reject]) -> None:
    from scheduler.display.events import LineRejected

    for number, reject in enumerate(rejects, start=1):
        display.note(LineRejected(reject.line_number, reject.custom_id, reject.reason, number, len(rejects)))


def _end(run: Run, outcome: Outcome, num_rejects: int, display: Display) -> None:
    """Tell how the run stands, and exit with what that means."""
    from scheduler.display.events import RunEnded

    place = run.store.shown_uri
    outputs = (f"{place}/output.jsonl", f"{place}/output.parquet")
    display.note(RunEnded(place, outcome.state, outcome.jobs, outputs))
    if outcome.state == "interrupted":
        click.get_current_context().exit(INTERRUPTED)
    if outcome.num_without_result or num_rejects:
        click.get_current_context().exit(SOME_FAILED)
