"""The command `resume`."""

from __future__ import annotations

from typing import Any

import click

from scheduler.commands.launch_options import launch_options, make_settings, output_mode
from scheduler.commands.launching import end, launch_shown
from worker.drafters.catalogue import ENGINES


@click.command()
@click.argument("run_uri", metavar="RUN")
@click.option("--retry-failed", is_flag=True, help="Also run the jobs again that failed or were cancelled.")
@click.option("--engine", type=click.Choice(list(ENGINES)), help="Another engine, same output. [default: the run's]")
@launch_options
def resume(run_uri: str, retry_failed: bool, may_take_over: bool, quiet: bool, as_json: bool, **options: Any) -> None:
    """Go on with an interrupted run: every unfinished job continues from its checkpoint.

    Workers, their number and the engine may differ from those before: the output is the same.

    \b
    Example:
      swiftbatch resume my-run --workers 2
    """
    from jobs.run.run import Run
    from scheduler.display.display import open_display
    from scheduler.display.events import ErrorsCleared
    from scheduler.driver.hold import Hold
    from scheduler.driver.takeover import refuse_if_taken
    from scheduler.runs.manifest import refuse_changed_model

    mode, settings = output_mode(quiet, as_json), make_settings(**options)
    run = Run.open(run_uri, settings.start_retries)
    refuse_if_taken(run, may_take_over)  # before a look at the model; the hold looks again
    refuse_changed_model(run)
    with open_display(mode) as display, Hold(run, may_take_over, forgets_cancel=retry_failed) as hold:
        if retry_failed:
            display.note(ErrorsCleared(run.clear_errors()))
        outcome = launch_shown(hold, len(run.job_ids()), settings, display)
    end(run, outcome, 0, display)
