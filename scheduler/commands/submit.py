"""The command `submit`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from scheduler.commands.launch_options import launch_options, make_launch_options, output_mode
from scheduler.commands.launching import START_RETRY_SECONDS, end, launch_shown
from scheduler.commands.model_options import MAX_THREADS, filled
from worker.drafters.names import DEFAULT_ENGINE, ENGINE_NAMES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobs.input.reader import Reject
    from scheduler.display.display import Display


@click.command()
@click.argument("jobs", type=click.Path())
@click.option("--run", "run_uri", required=True, help="Folder of the run: a path, s3:// or gs://. Made if absent.")
@click.option("--model", callback=filled, help="`embedded`, a folder, or a hub id. [default: embedded]")
@click.option(
    "--engine", type=click.Choice(ENGINE_NAMES), help=f"Changes speed, not output. [default: {DEFAULT_ENGINE}]"
)
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), help="[default: bfloat16]")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), help="[default: auto]")
@click.option(
    "--threads", type=click.IntRange(1, MAX_THREADS), help="CPU threads per worker. [default: cores / workers]"
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), help="For jobs without a seed of their own. [default: 0]")
@click.option("--strict", is_flag=True, help="Refuse the whole file if one line is bad.")
@launch_options
def submit(
    jobs: str, run_uri: str, threads: int | None, strict: bool, quiet: bool, as_json: bool, **options: Any
) -> None:
    """Run the jobs of a JSONL file and wait for them. The same file again runs only what is missing.

    JOBS holds one JSON object a line: `custom_id`, `prompt` (or `messages`), `max_tokens` and sampling fields, or an
    OpenAI Batch line. It may be compressed (gzip, zstd), in an object store, a pipe, or `-` for standard input.

    \b
    Exit code: 0 all jobs finished, 1 some failed or were rejected, 130 interrupted,
    2 wrong usage or input, or the run had to stop: then `swiftbatch resume` goes on.

    \b
    Example:
      swiftbatch submit jobs.jsonl --run my-run --workers 2
    """
    from jobs.storage.retries import Retries
    from scheduler.display.display import open_display
    from scheduler.runs.settings import Settings
    from scheduler.runs.submission import submission

    mode = output_mode(quiet, as_json)
    settings = Settings(
        **{name: options.pop(name) for name in ("model", "engine", "dtype", "device", "seed")},
        draft_model=options["draft_model"],
        kv_offload=options["kv_offload"],
        num_threads=threads,
        num_workers=options["workers"],
        address=options["address"],
        retries=Retries(min(START_RETRY_SECONDS, options["store_retry_seconds"])),
    )
    may_take_over = options.pop("may_take_over")
    with (
        open_display(mode) as display,
        submission(jobs, run_uri, settings, strict, may_take_over) as submitted,
    ):
        _tell_rejects(display, submitted.rejects)
        outcome = launch_shown(submitted.hold, len(submitted.records), make_launch_options(**options), display)
    end(submitted.run, outcome, len(submitted.rejects), display)


def _tell_rejects(display: Display, rejects: Sequence[Reject]) -> None:
    from scheduler.display.events import LineRejected

    for number, reject in enumerate(rejects, start=1):
        display.note(LineRejected(reject.line_number, reject.custom_id, reject.reason, number, len(rejects)))
