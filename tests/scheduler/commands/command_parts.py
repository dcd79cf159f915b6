from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import click
from click.testing import CliRunner, Result

from swiftbatch.jobs.run.run import Run
from swiftbatch.scheduler.cli import main
from swiftbatch.scheduler.driver.run_lease import current_progress
from tests.jobs.run import run_parts


def invoke(*args: str) -> Result:
    return CliRunner().invoke(main, list(args))


def refusal(*args: str) -> str:
    """Return the one stderr line; the exit code must be 2."""
    result = invoke(*args)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr.strip()


def write_jobs(path: Path, *jobs: dict[str, object] | str) -> str:
    lines = [job if isinstance(job, str) else json.dumps(job) for job in jobs]
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def job(custom_id: str, max_tokens: int = 20, **fields: object) -> dict[str, object]:
    return {"custom_id": custom_id, "prompt": "the quick brown fox", "max_tokens": max_tokens, **fields}


def finish(run: Run, custom_id: str, text: str) -> None:
    record = next(record for record in run.jobs() if record.job.custom_id == custom_id)
    assert run_parts.finish(run, record, text, num_drafts=2)


def pretend_to_run(run: Run, seconds_ago: float = 0.0) -> None:
    """Write a heartbeat of a driver on another host."""
    alive = {
        "state": "running",
        "driver_host": "elsewhere",
        "driver_pid": 1,
        "driver_process": None,
        "updated": time.time() - seconds_ago,
    }
    run.write_progress(current_progress(run).model_copy(update=alive))


def walk(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            yield from walk(child, (*path, name))


COMMANDS = dict(walk(main, ("swiftbatch",)))
LEAVES = {
    " ".join(path[1:]): command
    for path, command in COMMANDS.items()
    if not isinstance(command, click.Group) or command.invoke_without_command
}
