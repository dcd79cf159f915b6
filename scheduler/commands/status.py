"""The command `status`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from swiftbatch.jobs.run.run import Run
    from swiftbatch.jobs.run.run_records import Progress


@click.command()
@click.argument("run_uri", metavar="RUN")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: one object, or with --watch one per line.")
@click.option("--watch", "is_watching", is_flag=True, help="Keep updating until no driver is running.")
def status(run_uri: str, as_json: bool, is_watching: bool) -> None:
    """Show a run's progress, which worker has which job, and how many tokens each running job has.

    \b
    Example:
      swiftbatch status my-run --watch
    """
    from swiftbatch.jobs.run.run import Run
    from swiftbatch.scheduler.display.progress_line import damage_lines
    from swiftbatch.scheduler.driver.run_lease import current_progress
    from swiftbatch.scheduler.runs.run_watch import patient

    run = Run.open(run_uri)
    if is_watching:
        run = patient(run)
        _watch_status(run, as_json)
    elif as_json:
        progress = current_progress(run)
        shown = progress.model_dump(mode="json") | {"cost": progress.cost, "clock": run.manifest.clock}
        click.echo(json.dumps(shown, indent=2))
    else:
        _show_status(run, current_progress(run))
    for line in damage_lines(run):
        click.echo(line, err=True)


def _watch_status(run: Run, as_json: bool) -> None:
    from swiftbatch.scheduler.display.display import open_display
    from swiftbatch.scheduler.runs.run_watch import watch

    if not as_json:
        _show_run(run)
    with open_display("json" if as_json else "auto") as display:
        progress = watch(run, display)
    if not as_json:
        _show_what_next(run, progress)


def _show_run(run: Run) -> None:
    from swiftbatch.scheduler.display.progress_line import printable

    manifest = run.manifest
    place = printable(run.store.shown_uri)
    click.echo(f"{place} ({manifest.run_id}): model {printable(manifest.model)}, engine {manifest.engine}")
    if manifest.lora:
        click.echo(f"adapters: {printable(', '.join(manifest.lora))}")
    click.echo(f"clock of chat templates: {printable(manifest.clock)}")


def _show_status(run: Run, progress: Progress) -> None:
    from swiftbatch.jobs.run.shards import DATA, SHARDS_FOLDER
    from swiftbatch.scheduler.display.progress_line import counted, numerics_lines, printable, summary_line, worker_line
    from swiftbatch.scheduler.runs.extension import kept_of

    _show_run(run)
    click.echo(summary_line(progress))
    if num_rejects := len(run.rejects()):
        click.echo(f"rejected: {counted(num_rejects, 'line')} of the job file; the reasons are in rejects.jsonl")
    for worker in progress.workers:
        click.echo(f"  {worker_line(worker, progress.running)}")
    for line in numerics_lines(progress):
        click.echo(f"  {line}")
    if num_shards := len(run.store.list(DATA)):
        click.echo(f"shards: {num_shards:,} so far, all final, in {printable(run.store.shown_uri)}/{SHARDS_FOLDER}")
    if kept := str(kept_of(run)):
        click.echo(f"kept for `swiftbatch extend`: {kept}; `swiftbatch prune` drops it")
    _show_what_next(run, progress)


def _show_what_next(run: Run, progress: Progress) -> None:
    from swiftbatch.scheduler.display.progress_line import SUBMIT_AGAIN, duration, printable
    from swiftbatch.scheduler.runs.run_watch import silent_driver

    place = printable(run.store.shown_uri)
    if (cost := _cost_line(progress)) is not None:
        click.echo(f"cost: {cost}")
    if progress.state == "interrupted" and progress.reached_limit is not None:
        click.echo(f"stopped at {printable(progress.reached_limit)}")
    if progress.state == "interrupted" and (silence := silent_driver(run)) is not None:
        click.echo(f"{silence}; if it is surely dead: swiftbatch resume {place} --takeover")
    elif progress.state == "interrupted" and run.lacks_its_jobs():
        click.echo(f"no driver runs it, and its submit was cut short; {SUBMIT_AGAIN}")
    elif progress.state == "interrupted":
        click.echo(f"no driver runs it; go on with: swiftbatch resume {place}")
    elif progress.state != "running" and progress.driver_host:
        click.echo(f"took {duration(progress.updated - progress.started)} since the last start")


def _cost_line(progress: Progress) -> str | None:
    """Return what the run costs so far; None without a price."""
    from swiftbatch.metrics.report.page_text import amount

    if progress.cost is None or progress.price_per_worker_hour is None:
        return None
    hours, per_token = progress.worker_seconds / 3600, progress.cost_per_token
    line = f"{amount(progress.cost)} for {hours:,.4g} worker hours at {amount(progress.price_per_worker_hour)} each"
    return line if per_token is None else f"{line}; {amount(per_token * 1e6)} per million tokens"
