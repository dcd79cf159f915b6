"""Commands that run jobs: submit, resume, cancel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from worker.drafters.names import DEFAULT_ENGINE, ENGINE_NAMES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.reader import Reject
    from jobs.run import Run
    from scheduler.launch import LaunchOptions, Outcome

NUM_REJECTS_SHOWN = 5
SOME_FAILED = 1
INTERRUPTED = 130

Command = TypeVar("Command", bound=Callable[..., Any])

LAUNCH_OPTIONS = [
    click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="Worker processes."),
    click.option("--slots", type=click.IntRange(1), default=1, show_default=True, help="Jobs at a time per worker."),
    click.option("--address", help="A running Ray cluster, as HOST:PORT. [default: an embedded Ray]"),
    click.option(
        "--max-attempts",
        type=click.IntRange(1),
        default=5,
        show_default=True,
        help="Attempts in a row without progress before a job is given up.",
    ),
    click.option(
        "--checkpoint-seconds",
        type=click.FloatRange(0, min_open=True),
        default=5.0,
        show_default=True,
        help="Work that a killed worker costs at most; longer spares an object store.",
    ),
    click.option("--metrics-port", type=click.IntRange(0, 65535), help="Serve metrics: the driver here (0: any port)."),
]


def launch_options(command: Command) -> Command:
    """Add the options that submit and resume share."""
    for option in reversed(LAUNCH_OPTIONS):
        command = option(command)
    return command


@click.command()
@click.argument("jobs", type=click.Path())
@click.option("--run", "run_uri", required=True, help="Folder of the run: a path, s3:// or gs://. Made if absent.")
@click.option("--model", help="`embedded`, a folder, or a hub id. [default: embedded]")
@click.option(
    "--engine", type=click.Choice(ENGINE_NAMES), help=f"Changes speed, not output. [default: {DEFAULT_ENGINE}]"
)
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), help="[default: bfloat16]")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), help="[default: auto]")
@click.option("--threads", type=click.IntRange(1), help="CPU threads per worker. [default: cores / workers]")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), help="For jobs without a seed of their own. [default: 0]")
@click.option("--strict", is_flag=True, help="Refuse the whole file if one line is bad.")
@launch_options
def submit(jobs: str, run_uri: str, threads: int | None, strict: bool, **options: Any) -> None:
    """Run the jobs of a JSONL file and wait for them. The same file again runs only what is missing.

    JOBS holds one JSON object a line: `custom_id`, `prompt` (or `messages`), `max_tokens` and sampling fields, or an
    OpenAI Batch line.

    \b
    Exit code: 0 all jobs finished, 1 some failed or were rejected, 2 wrong usage or input, 130 interrupted.

    \b
    Example:
      swiftbatch submit jobs.jsonl --run my-run --workers 2
    """
    from scheduler.settings import Settings
    from scheduler.submission import submit_file

    settings = Settings(
        **{name: options.pop(name) for name in ("model", "engine", "dtype", "device", "seed")},
        num_threads=threads,
        num_workers=options["workers"],
        address=options["address"],
    )
    submission = submit_file(jobs, run_uri, settings, strict)
    submission.run.clear_cancel()
    _show_rejects(submission.rejects)
    click.echo(f"{len(submission.records)} jobs in {submission.run.store.shown_uri}")
    _launch(submission.run, _options(**options), len(submission.rejects))


@click.command()
@click.argument("run_uri", metavar="RUN")
@click.option("--retry-failed", is_flag=True, help="Also run the jobs again that failed or were cancelled.")
@launch_options
def resume(run_uri: str, retry_failed: bool, **options: Any) -> None:
    """Go on with an interrupted run: every unfinished job continues from its token log.

    \b
    Example:
      swiftbatch resume my-run --workers 2
    """
    from jobs.run import Run
    from scheduler.heartbeat import refuse_if_taken

    run = Run.open(run_uri)
    refuse_if_taken(run)  # before Ray starts; the driver looks again
    if retry_failed:
        run.clear_cancel()
        click.echo(f"{run.clear_errors()} failed or cancelled jobs are to be run again")
    _launch(run, _options(**options), 0)


@click.command()
@click.argument("run_uri", metavar="RUN")
@click.argument("custom_id", required=False)
def cancel(run_uri: str, custom_id: str | None) -> None:
    """Cancel a run, or one job of it. Finished results stay; partial text stays readable with `tail`.

    \b
    Example:
      swiftbatch cancel my-run story-7
    """
    from jobs.run import Run
    from scheduler.cancellation import cancel_jobs

    click.echo(cancel_jobs(Run.open(run_uri), custom_id))


def _options(workers: int, slots: int, **options: Any) -> LaunchOptions:
    from scheduler.launch import LaunchOptions

    return LaunchOptions(num_workers=workers, num_slots=slots, **options)


def _launch(run: Run, options: LaunchOptions, num_rejects: int) -> None:
    from scheduler.launch import launch

    outcome = launch(run, options)
    _show_outcome(run, outcome)
    if outcome.state == "interrupted":
        click.get_current_context().exit(INTERRUPTED)
    if outcome.num_without_result or num_rejects:
        click.get_current_context().exit(SOME_FAILED)


def _show_rejects(rejects: Sequence[Reject]) -> None:
    for reject in rejects[:NUM_REJECTS_SHOWN]:
        custom_id = f" ({reject.custom_id})" if reject.custom_id else ""
        click.echo(f"rejected line {reject.line_number}{custom_id}: {reject.reason}", err=True)
    if len(rejects) > NUM_REJECTS_SHOWN:
        click.echo(f"and {len(rejects) - NUM_REJECTS_SHOWN} more rejected lines, all in rejects.jsonl", err=True)


def _show_outcome(run: Run, outcome: Outcome) -> None:
    from scheduler.summary import job_counts

    place = run.store.shown_uri
    click.echo(f"run {outcome.state}; jobs: {job_counts(outcome.jobs)}")
    if outcome.state == "interrupted":
        click.echo(f"nothing is lost; go on with: swiftbatch resume {place}")
        return
    if outcome.jobs.get("failed") or outcome.jobs.get("cancelled"):
        click.echo(f"to run failed and cancelled jobs again: swiftbatch resume {place} --retry-failed")
    click.echo(f"results: {place}/output.jsonl and {place}/output.parquet")
