"""The command line's texts and all metrics' names, as text for comparisons."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import click
from click.testing import CliRunner

from swiftbatch.metrics.reference import render
from swiftbatch.scheduler.cli import main
from swiftbatch.scheduler.runs.run_settings import Settings
from swiftbatch.scheduler.runs.submission import submission

GOOD = '{"custom_id": "a", "prompt": "Once", "max_tokens": 8}'
JOB_FILES = {
    "good.jsonl": [GOOD],
    "empty.jsonl": [],
    "text.jsonl": ["no JSON"],
    "field.jsonl": ['{"custom_id": "b", "prompt": "Once", "max_tokens": 8, "temprature": 1}'],
    "value.jsonl": ['{"custom_id": "b", "prompt": "Once", "max_tokens": 8, "temperature": -1}'],
    "twice.jsonl": [GOOD, GOOD],
    "long.jsonl": ['{"custom_id": "b", "prompt": "Once", "max_tokens": 99999999}'],
    "tools.jsonl": ['{"custom_id": "b", "prompt": "Once", "max_tokens": 8, "tools": [1]}'],
    "schema.jsonl": ['{"custom_id": "b", "prompt": "Once", "max_tokens": 8, "structured_outputs": {"regex": "("}}'],
}
MISTAKES = [
    *(f"submit {name} --run new --strict" for name in JOB_FILES if name != "good.jsonl"),
    *("submit", "submit absent.jsonl --run new", "submit good.jsonl", "submit good.jsonl --run new --workers 0"),
    *("submit good.jsonl --run new --model absent", "submit good.jsonl --run new --engine warp"),
    *("submit good.jsonl --run new --dtype int4", "submit good.jsonl --run new --device cpu --linear triton"),
    *(
        "submit good.jsonl --run new --draft-model absent --engine triforce",
        "submit good.jsonl --run run --dtype float32",
    ),
    *("submit good.jsonl --run new --slots many", "submit good.jsonl --run new --colour red", "launch"),
    *("status absent", "status run", "results absent", "results run", "tail run b", "tail absent a", "tail run a"),
    *("resume absent", "resume run --deadline soon", "resume run --webhook ftp://host/x", "report absent"),
    *("extend run", "extend run --max-tokens 0", "extend absent --max-tokens 9"),
    *(
        "cancel absent",
        "cancel run b",
        "cancel run a",
        "cancel run",
        "prune absent",
        "inspect absent",
        "inspect embedded",
    ),
    *("serve", "serve --runs r --host 0.0.0.0", "doctor --model ./absent", "quantize embedded", "nightly"),
    *("bench decode --engines warp", "bench decode --positions many", "bench all --output o", "chaos --kills -1"),
    *("train griffin", "train target --data absent --output o", "--version"),
]
CHANGING = re.compile(r"run-\d{8}-\d{6}-[0-9a-f]+|\d{4}-\d\d-\d\dT[0-9:+.]+|[\d.,]+ [GMk]?B\b|0x[0-9a-f]+")


def surface() -> dict[str, str]:
    """Return helps, error messages and metrics."""
    runner = CliRunner(env={"COLUMNS": "100"})
    cells = {
        f"help {' '.join(path)}": runner.invoke(main, [*path, "--help"], terminal_width=98).output
        for path in paths_of(main, ())
    }
    with TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name, lines in JOB_FILES.items():
            Path(name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        with submission("good.jsonl", "run", Settings({"device": "cpu"})):
            pass
        for command in MISTAKES:
            result = runner.invoke(main, command.split())
            text = f"exit code {result.exit_code}\n{result.stdout}{result.stderr}".replace(os.getcwd(), "HERE")
            cells[command] = CHANGING.sub("?", text)
    cells["metrics"] = "\n".join(line for line in render().splitlines() if line.startswith("| `"))
    return cells


def paths_of(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    yield path
    for name, child in command.commands.items() if isinstance(command, click.Group) else ():
        yield from paths_of(child, (*path, name))
