"""The command `prune`."""

from __future__ import annotations

import click


@click.command()
@click.argument("run_uri", metavar="RUN")
@click.option("--state", is_flag=True, help="Only delete the caches that --keep-state kept.")
@click.option("--logs", is_flag=True, help="Only delete the token logs. [default: both]")
def prune(run_uri: str, state: bool, logs: bool) -> None:
    """Delete the checkpoints that a run keeps of finished jobs. Results stay. Without its token log a job can't be
    extended.

    \b
    Example:
      swiftbatch prune my-run --state
    """
    from swiftbatch.jobs.run.run import Run
    from swiftbatch.scheduler.runs.extension import prune

    is_all = not (state or logs)
    click.echo(prune(Run.open(run_uri), logs=logs or is_all, state=state or is_all))
