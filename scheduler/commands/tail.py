"""The command `tail`."""

from __future__ import annotations

import sys

import click

from swiftbatch.scheduler.commands.exit_codes import tell_of_damage
from swiftbatch.scheduler.commands.options.option_types import WholeNumber


@click.command()
@click.argument("run_uri", metavar="RUN")
@click.argument("custom_id")
@click.option("--follow", is_flag=True, help="Keep printing until the job ends.")
@click.option("--choice", type=WholeNumber(0), default=0, help="Which choice of the line, counted from 0.")
def tail(run_uri: str, custom_id: str, follow: bool, choice: int) -> None:
    """Print what a job has written so far, up to its last checkpoint.

    \b
    Example:
      swiftbatch tail my-run story-7 --follow
    """
    from swiftbatch.jobs.run.run import Run
    from swiftbatch.scheduler.display.progress_line import harmless
    from swiftbatch.scheduler.runs.run_watch import follow_text, patient

    run = Run.open(run_uri)
    run = patient(run) if follow else run
    for piece in follow_text(run, custom_id, follow, choice):
        click.echo(harmless(piece) if sys.stdout.isatty() else piece, nl=False)
    click.echo()
    tell_of_damage(run)
