"""The command `fork`."""

from __future__ import annotations

from typing import Any

import click

from swiftbatch.scheduler.commands.exit_codes import end, launch_shown
from swiftbatch.scheduler.commands.options.launch_options import (
    ENGINE,
    check_engine,
    launch_options,
    make_settings,
    shown,
)
from swiftbatch.scheduler.commands.options.option_types import GroupedCommand, WholeNumber, options_of, utf8

MOST_FORKS = 2048
fork_option = options_of("The run")


@click.command(cls=GroupedCommand)
@click.argument("run_uri", metavar="RUN")
@click.argument("custom_id", metavar="JOB")
@fork_option("--at", "num_kept", type=WholeNumber(0), metavar="N", required=True, help="Keep the first N tokens.")
@fork_option("--seeds", "num_seeds", type=WholeNumber(1, MOST_FORKS), metavar="N", default=1, help="Number of forks.")
@fork_option(
    "--replace", "text", metavar="TEXT", default="", show_default=False, callback=utf8, help="Go on with this text."
)
@fork_option("--choice", type=WholeNumber(0), metavar="K", default=0, help="Fork this choice of the job.")
@fork_option("--name", metavar="NAME", callback=utf8, help="For NAME#1, NAME#2, ... [default: JOB@N]")
@ENGINE
@launch_options
def fork(
    run_uri: str,
    custom_id: str,
    num_kept: int,
    num_seeds: int,
    text: str,
    choice: int,
    name: str | None,
    may_take_over: bool,
    **options: Any,
) -> None:
    """Make jobs that begin with a job's first tokens and go on with other seeds, and run them.

    The job may have ended or not, but nobody may work on the run. Forks are jobs of the same run: a worker reads their
    common beginning once. The same command again continues them.

    \b
    Example:
      swiftbatch fork my-run story-7 --at 1000 --seeds 8
      swiftbatch fork my-run story-7 --at 1000 --replace " But the door was open."
    """
    from swiftbatch.jobs.run.run import Run
    from swiftbatch.scheduler.driver.run_lease import RunLease, refuse_if_taken
    from swiftbatch.scheduler.runs.forking import forks
    from swiftbatch.scheduler.runs.launch import refuse_launch
    from swiftbatch.scheduler.runs.run_manifest import computation_of, refuse_changed_model
    from swiftbatch.worker.model.model_files import locate_model

    showing, settings = shown(options), make_settings(**options)
    run = Run.open(run_uri, settings.start_retries)
    refuse_if_taken(run, may_take_over)  # before loading the model; the hold checks again
    refuse_changed_model(run)
    refuse_launch(run, settings)
    check_engine(vars(computation_of(run.manifest, settings)))
    files = locate_model(run.manifest.stored_model, is_whole=False)
    with showing as display, RunLease(run, may_take_over, forgets_cancel=True) as hold:
        name = f"{custom_id}@{num_kept}" if name is None else name
        made = forks(run, custom_id, choice, num_kept, num_seeds, text, name, files)
        run.add_jobs(made)
        outcome = launch_shown(hold, len(run.job_ids()), settings, display)
    end(run, outcome, 0, display)
