"""The command `cancel`."""

from __future__ import annotations

import click


@click.command()
@click.argument("run_uri", metavar="RUN")
@click.argument("custom_id", required=False)
def cancel(run_uri: str, custom_id: str | None) -> None:
    """Cancel a run, or one job of it with all its choices. Finished results stay; `tail` still shows partial text.

    \b
    Example:
      swiftbatch cancel my-run story-7
    """
    from swiftbatch.jobs.run.run import Run
    from swiftbatch.scheduler.display.progress_line import printable
    from swiftbatch.scheduler.runs.cancellation import cancel_jobs

    click.echo(printable(cancel_jobs(Run.open(run_uri), custom_id)))
