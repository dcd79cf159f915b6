"""The command `resume`."""

from __future__ import annotations

from typing import Any

import click

from swiftbatch.scheduler.commands.exit_codes import end, launch_shown
from swiftbatch.scheduler.commands.options.launch_options import ENGINE, launch_options, make_settings, shown
from swiftbatch.scheduler.commands.options.option_types import GroupedCommand, options_of


@click.command(cls=GroupedCommand)
@click.argument("run_uri", metavar="RUN")
@options_of("The run")("--retry-failed", is_flag=True, help="Also run failed and cancelled jobs again.")
@ENGINE
@launch_options
def resume(run_uri: str, retry_failed: bool, may_take_over: bool, **options: Any) -> None:
    """Continue an interrupted run: every unfinished job resumes from its checkpoint.

    Other workers, another number of them or another engine give the same output. The exit code is as for `submit`: 1
    also where the run's newest file had lines that were rejected.

    \b
    Example:
      swiftbatch resume my-run --workers 2
    """
    from swiftbatch.jobs.run.run import Run
    from swiftbatch.jobs.run.run_records import RunError
    from swiftbatch.scheduler.display.events import ErrorsCleared
    from swiftbatch.scheduler.display.progress_line import SUBMIT_AGAIN
    from swiftbatch.scheduler.driver.attempt_numbers import forget_strikes
    from swiftbatch.scheduler.driver.run_lease import RunLease, refuse_if_taken
    from swiftbatch.scheduler.runs.run_manifest import refuse_changed_model

    showing, settings = shown(options), make_settings(**options)
    run = Run.open(run_uri, settings.start_retries)
    refuse_if_taken(run, may_take_over)  # before loading the model; the hold checks again
    if run.lacks_its_jobs():
        raise RunError(f"the run at {run.store.shown_uri} has no jobs, its submit was cut short; {SUBMIT_AGAIN}")
    refuse_changed_model(run)
    with showing as display, RunLease(run, may_take_over, forgets_cancel=retry_failed) as hold:
        if retry_failed:
            cleared = run.clear_errors()
            forget_strikes(run.store, hold.epoch.number, cleared)
            display.note(ErrorsCleared(len(cleared)))
        outcome = launch_shown(hold, len(run.job_ids()), settings, display)
    end(run, outcome, len(run.rejects()), display)
