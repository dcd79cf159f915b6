"""Commands as a user types them, job files, and results that need no worker, for tests of commands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
from click.testing import CliRunner, Result

from swiftbatch.jobs.run.output_line import success_line
from swiftbatch.jobs.run.run import Run
from swiftbatch.scheduler.cli import main
from tests.jobs.run.run_parts import write_result


def invoke(*args: str) -> Result:
    return CliRunner().invoke(main, list(args))


def refusal(*args: str) -> str:
    """The one line on stderr of a command that is refused with exit code 2."""
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
    token_ids = np.arange(5, dtype=np.uint32)
    metrics = {"num_drafts": 2}
    line = success_line(
        record,
        "run",
        text,
        "length",
        model="tiny",
        system_fingerprint=run.manifest.fingerprint,
        token_ids=token_ids,
        metrics=metrics,
    )
    assert write_result(run, record.job_id, line)


def walk(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            yield from walk(child, (*path, name))


COMMANDS = dict(walk(main, ("swiftbatch",)))
