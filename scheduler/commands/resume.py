"""The command `resume`."""

from __future__ import annotations

from typing import Any

import click

from scheduler.commands.launch_options import launch_options, make_launch_options, output_mode
from scheduler.commands.launching import START_RETRY_SECONDS, end, launch_shown
from worker.drafters.names import ENGINE_NAMES


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
        outcome = launch_shown(hold, len(run.job_ids()), make_launch_options(**options), display)
    end(run, outcome, 0, display)
