"""The command `report`: a run as one HTML page."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("run_uri", metavar="RUN")
@click.option("--output", default="report.html", type=click.Path(dir_okay=False), help="File to write.")
def report(run_uri: str, output: str) -> None:
    """Write an HTML report of a run: speed, acceptance, workers, jobs, failures with reasons.

    It only needs the run folder, works at any time, and opens in any browser without a network.

    \b
    Example:
      swiftbatch report my-run --output report.html
    """
    from swiftbatch.jobs.python_processes import rare_garbage_collection
    from swiftbatch.jobs.run.run import Run
    from swiftbatch.metrics.report.page import render
    from swiftbatch.metrics.report.run_facts import gather
    from swiftbatch.scheduler.display.progress_line import counted, damage_lines, printable
    from swiftbatch.scheduler.driver.run_lease import claims, current_progress

    run = Run.open(run_uri)
    with rare_garbage_collection():
        facts = gather(run, current_progress(run), claims(run))
        page = render(facts, run.store, str(Path(output).resolve().parent)).encode(errors="replace")
    try:
        Path(output).write_bytes(page)
    except OSError as error:
        raise click.FileError(output, error.strerror) from None
    click.echo(f"report of {counted(facts.tally.num_jobs, 'job')}: {printable(output)} ({len(page) / 1000:,.0f} kB)")
    for line in damage_lines(run):
        click.echo(line, err=True)
