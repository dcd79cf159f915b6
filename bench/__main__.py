"""`python -m bench`: runs a benchmark module, which has `Options` and `run`.

The field `num_tokens` is `--tokens`, `json_path` is `--json`, tuples are comma-separated.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import click
from pydantic.fields import FieldInfo

from bench.papers import PAPERS, Rows, about, add_runs, draw, over_runs
from bench.tables import Record, tables
from swiftbatch.scheduler.cli import SETTINGS, OneLineErrors
from swiftbatch.scheduler.commands.bench import decode
from swiftbatch.scheduler.commands.options.option_types import checked

MODULES = {name: f"bench.{name.replace('-', '_')}" for name in (
    "agreement", "auto", "checkpoints", "fields", "kernels", "long", "many-jobs", "mixed", "peers", "prompts",
    "scale", "sizing", "tail", "texts",
)} | {"all": "bench.suite", "gpu": "bench.gpu.gpu"}  # fmt: skip


class Benches(OneLineErrors):
    """Commands by module, imported when needed."""

    modules = MODULES

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted([*self.modules, *self.commands])

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name in self.modules:
            return command_of(name, importlib.import_module(self.modules[name]))
        return super().get_command(context, name)


class Papers(Benches):
    """Commands by paper."""

    modules = PAPERS

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        return paper_command(name, importlib.import_module(self.modules[name])) if name in self.modules else None


def command_of(name: str, module: ModuleType) -> click.Command:
    def run(is_markdown: bool, **given: Any) -> None:
        options, records = _checked(module, given), list[Record]()
        try:
            with _lines(given.get("json_path")) as lines:
                for record in module.run(options):
                    records.append(record)
                    _write(record, lines)
        finally:
            if records:
                shown = module.shown(records, options) if hasattr(module, "shown") else records
                click.echo(tables(shown, is_markdown=is_markdown))

    return click.Command(name, SETTINGS, run, _params(module), help=module.run.__doc__)


RUNS = click.Option(
    ["--runs", "num_runs"],
    type=click.IntRange(min=1),
    default=1,
    help="Run each table so often, with one seed after the other; cells are then mean ± standard deviation.",
)
PLOT = click.Option(["--plot"], type=click.Path(path_type=Path), help="Draw figures that are curves into this folder.")


def paper_command(name: str, module: ModuleType) -> click.Command:
    def run(is_markdown: bool, num_runs: int, plot: Path | None, **given: Any) -> None:
        options = _checked(module, given)
        with _lines(given.get("json_path")) as lines:
            if options.json_path is not None:
                _write(about(name, options), lines)
            for one in module.each_table(options):
                runs = list[Rows]()
                try:
                    add_runs(runs, module, one, num_runs, functools.partial(_write, lines=lines))
                finally:
                    if runs:
                        click.echo(tables(over_runs(runs), is_markdown=is_markdown) + "\n")
                if plot is not None and one.table in module.CURVES:
                    draw(plot / f"{name}-{one.table}.png", module.CURVES[one.table], runs)

    return click.Command(name, SETTINGS, run, [*_params(module), RUNS, PLOT], help=module.run.__doc__)


def _checked(module: ModuleType, given: dict[str, Any]) -> Any:
    if "num_threads" in module.Options.model_fields and given["num_threads"] is None:
        given["num_threads"] = len(os.sched_getaffinity(0))
    return checked(module.Options, {field: value for field, value in given.items() if value is not None})


def _params(module: ModuleType) -> list[click.Parameter]:
    params: list[click.Parameter] = [option_of(*item) for item in module.Options.model_fields.items()]
    return [*params, click.Option(["--markdown", "is_markdown"], is_flag=True, help="Print tables as Markdown.")]


def _write(record: Record, lines: IO[str]) -> None:
    print(json.dumps(record, default=str), file=lines, flush=True)


def option_of(name: str, field: FieldInfo) -> click.Option:
    said = "--" + name.removeprefix("num_").removesuffix("_path").replace("_", "-")
    if field.annotation is bool:
        return click.Option([said, name], is_flag=True, default=None)
    default = field.default
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
    told = "" if field.is_required() or default is None else f"[default: {shown}]"
    return click.Option([said, name], required=field.is_required(), help=field.description or told)


@contextlib.contextmanager
def _lines(path: str | None) -> Iterator[IO[str]]:
    """Yield the stream for records: the named file, or stderr."""
    if path is None:
        yield sys.stderr
    else:
        with Path(path).open("w", encoding="utf-8") as file:
            yield file


@click.group(cls=Benches, context_settings=SETTINGS, invoke_without_command=True)
@click.pass_context
def main(context: click.Context) -> None:
    """Run a benchmark, or repeat a table of a paper. Records are JSON lines, in the file of `--json` where it is named.

    \b
    Example:
      python -m bench auto --positions 2048,16384 --slots 1,8 --text book.txt
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
    elif context.invoked_subcommand == "decode":
        import bench.variants  # noqa: F401  then variants have names like engines


main.add_command(decode)


@main.group(cls=Papers, context_settings=SETTINGS)
def papers() -> None:
    """Repeat the tables and figures of a paper: all that can be had with the given options, or one (--table).

    \b
    Example:
      python -m bench papers token-recycling --table 1 --runs 5 --json table1.jsonl
    """


@main.command(context_settings=SETTINGS | {"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def digests(arguments: tuple[str, ...]) -> None:
    """Digests of all tokens, to compare before and behind a change."""
    sys.argv = ["digests", *arguments]
    runpy.run_module("bench.digests", run_name="__main__")


if __name__ == "__main__":
    main(prog_name="python -m bench")
