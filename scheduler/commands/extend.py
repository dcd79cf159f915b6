"""The command `extend`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from swiftbatch.scheduler.commands.exit_codes import end, launch_shown
from swiftbatch.scheduler.commands.options.launch_options import ENGINE, launch_options, make_settings, shown
from swiftbatch.scheduler.commands.options.option_types import GroupedCommand, WholeNumber, options_of

if TYPE_CHECKING:
    from swiftbatch.scheduler.display.display import Display
    from swiftbatch.scheduler.runs.extension import Extension


@click.command(cls=GroupedCommand)
@click.argument("run_uri", metavar="RUN")
@click.argument("custom_ids", metavar="[JOB]...", nargs=-1)
@options_of("The run")(
    "--max-tokens",
    type=WholeNumber(1, 2**31 - 1),
    metavar="N",
    required=True,
    help="New maximum number of tokens of a job, in all.",
)
@ENGINE
@launch_options
def extend(
    run_uri: str,
    custom_ids: tuple[str, ...],
    max_tokens: int,
    may_take_over: bool,
    **options: Any,
) -> None:
    """Continue jobs that ended at their max_tokens with a larger limit: all, or those named by `custom_id`.

    A job keeps the tokens it has, and gets those that a run with the larger limit would have had from the start. The
    longer result replaces the shorter one. Jobs that have not ended run to their own max_tokens; give the same command
    again to extend them, or to continue after an interruption.

    \b
    Example:
      swiftbatch extend my-run --max-tokens 600 story-7
    """
    from swiftbatch.jobs.run.run import Run
    from swiftbatch.scheduler.driver.run_lease import RunLease, refuse_if_taken
    from swiftbatch.scheduler.runs.cancellation import find_jobs
    from swiftbatch.scheduler.runs.extension import extend_jobs
    from swiftbatch.scheduler.runs.launch import refuse_launch
    from swiftbatch.scheduler.runs.run_manifest import refuse_changed_model
    from swiftbatch.scheduler.runs.submission import kv_room
    from swiftbatch.worker.model.model_files import locate_model

    showing, settings = shown(options), make_settings(**options)
    run = Run.open(run_uri, settings.start_retries)
    refuse_if_taken(run, may_take_over)  # before loading the model; the hold checks again
    for custom_id in custom_ids:
        find_jobs(run, custom_id)
    refuse_changed_model(run)
    files = locate_model(run.manifest.stored_model, is_whole=False)
    room = kv_room(run.manifest, files, settings)
    with showing as display, RunLease(run, may_take_over, forgets_cancel=True) as hold:
        extension = extend_jobs(hold, max_tokens, custom_ids, files, room, lambda: refuse_launch(run, settings))
        _tell(display, extension, max_tokens)
        outcome = launch_shown(hold, len(run.job_ids()), settings, display)
    end(run, outcome, len(extension.refused), display)


def _tell(display: Display, extension: Extension, max_tokens: int) -> None:
    from swiftbatch.scheduler.display.events import JobNotExtended, JobsExtended, JobsLongAlready

    num_refused = len(extension.refused)
    for number, (name, reason) in enumerate(extension.refused, start=1):
        display.note(JobNotExtended(name, reason, number, num_refused))
    if extension.already:
        display.note(JobsLongAlready(tuple(extension.already), max_tokens))
    display.note(JobsExtended(len(extension.records), extension.num_tokens, max_tokens))
