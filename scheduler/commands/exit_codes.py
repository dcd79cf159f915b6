"""Shared steps of commands that run jobs: launch, report, exit code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from swiftbatch.scheduler.process.signals import INTERRUPTED

if TYPE_CHECKING:
    from swiftbatch.jobs.run.run import Run
    from swiftbatch.scheduler.display.display import Display
    from swiftbatch.scheduler.driver.run_lease import RunLease
    from swiftbatch.scheduler.runs.launch import Outcome
    from swiftbatch.scheduler.runs.run_settings import Settings

SOME_FAILED = 1
LIMIT_REACHED = 3  # 2 means that a command can't go on
SAME_AGAIN = "nothing is lost, go on with the same command"


@contextmanager
def told_to_repeat() -> Iterator[None]:
    """Add a next step to an interruption that names none."""
    try:
        yield
    except BaseException as error:
        # Python 3.11 wraps an interruption that a class meets during an import
        interruption = error if isinstance(error, KeyboardInterrupt) else error.__cause__
        if not isinstance(interruption, KeyboardInterrupt):
            raise
        raise KeyboardInterrupt(*(interruption.args or [SAME_AGAIN])) from None


def launch_shown(hold: RunLease, num_jobs: int, settings: Settings, display: Display) -> Outcome:
    """Show the open run, then launch it."""
    from swiftbatch.scheduler.display.events import RunOpened
    from swiftbatch.scheduler.runs.launch import launch

    run = hold.epoch.run
    display.note(RunOpened(run.store.shown_uri, run.manifest.run_id, num_jobs))
    return launch(hold, settings, display)


def end(run: Run, outcome: Outcome, num_rejects: int, display: Display) -> None:
    """Report the run's state and exit with its code."""
    from swiftbatch.scheduler.display.events import RunEnded

    place = run.store.shown_uri
    outputs = (f"{place}/output.jsonl", f"{place}/output.parquet")
    code = _exit_code(outcome, num_rejects)
    display.note(RunEnded(place, outcome.state, outcome.jobs, outputs, outcome.reached_limit, code, outcome.num_tokens))
    if code:
        click.get_current_context().exit(code)


def tell_of_damage(run: Run) -> None:
    """List unusable files, and exit with 1 if there are any."""
    from swiftbatch.scheduler.display.progress_line import damage_lines

    damage = damage_lines(run)
    for problem in damage:
        click.echo(problem, err=True)
    if damage:
        click.get_current_context().exit(SOME_FAILED)


def _exit_code(outcome: Outcome, num_rejects: int) -> int:
    if outcome.reached_limit is not None:
        return LIMIT_REACHED
    if outcome.state == "interrupted":
        return INTERRUPTED
    return SOME_FAILED if outcome.num_without_result or num_rejects else 0
