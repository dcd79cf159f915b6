"""The command `serve`: OpenAI's Batch API over run folders."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from typing import Any

import click
from click.core import ParameterSource

from swiftbatch.scheduler.commands.options.launch_options import check_engine, make_settings, receiver_of, runs_options
from swiftbatch.scheduler.commands.options.option_types import GroupedCommand, WholeNumber, all_of, options_of
from swiftbatch.scheduler.commands.resume import resume
from swiftbatch.scheduler.commands.submit import submit
from swiftbatch.scheduler.commands.usage import usage
from swiftbatch.scheduler.driver.run_limits import Limits
from swiftbatch.scheduler.process.signals import INTERRUPTED
from swiftbatch.scheduler.runs.run_settings import ServeOptions, Settings
from swiftbatch.worker.config import CheckpointSettings, Computation

server_option = options_of("The server")
OF_THE_SERVER = {  # options of `submit` that a batch or the server sets
    *("jobs", "run_uri", "columns", "shards", "strict", "endpoint", "may_take_over"),
    *("deadline", "max_total_tokens", "max_worker_hours", "quiet", "as_json", "webhook", "webhook_jobs"),
    *("metrics_textfile", "team"),
}
NEEDED = ("fastapi", "uvicorn", "multipart")


def _make_key(context: click.Context, _parameter: click.Parameter, name: str | None) -> None:
    """Print a new key's line, and on stderr its secret, which is not stored."""
    if name is None or context.resilient_parsing:
        return
    from swiftbatch.scheduler.serve.records.api_keys import ApiKeyError, make_key

    try:
        secret, line = make_key(name)
    except ApiKeyError as error:
        raise click.BadParameter(str(error)) from None
    click.echo(f"the key of {name}, shown this once: {secret}", err=True)
    click.echo(line)
    context.exit()


OPTIONS = (
    server_option("--host", default=ServeOptions.host, help="Where to listen; loopback only without keys."),
    server_option(
        "--port",
        type=WholeNumber(0, 65535),
        metavar="PORT",
        default=ServeOptions.port,
        help="Port to listen on; 0 for any free one.",
    ),
    server_option(
        "--max-running",
        type=WholeNumber(1),
        metavar="N",
        default=ServeOptions.max_running,
        help="Number of batches that run at a time.",
    ),
    server_option(
        "--max-file-bytes",
        type=WholeNumber(1),
        metavar="N",
        default=ServeOptions.max_file_bytes,
        help="Largest file that may be uploaded.",
    ),
    server_option("--api-keys", metavar="FILE", help="File with a line for each key: see docs/serve.md."),
    server_option(
        "--webhook", metavar="URL", callback=receiver_of, help="Post a message when a batch ends: see docs/serve.md."
    ),
    server_option("--webhook-hosts", metavar="HOST,...", help="Hosts that a batch may name as its webhook."),
    server_option("--no-keys", "is_open", is_flag=True, help="Allow everybody who reaches the address."),
    server_option(
        "--make-key",
        metavar="NAME",
        callback=_make_key,
        is_eager=True,
        expose_value=False,
        help="Only print a new key and its line for the file.",
    ),
)


class ServeCommand(GroupedCommand, click.Group):
    """A command with its own options, or with a subcommand that needs none of them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        is_sub = bool(args) and args[0] in self.commands
        ctx.resilient_parsing |= is_sub  # asks for no option
        rest = super().parse_args(ctx, args)
        ctx.resilient_parsing &= not is_sub
        return rest


@click.command(cls=ServeCommand, invoke_without_command=True, subcommand_metavar="[usage]")
@runs_options("Folder of the server", "serve")
@all_of(*OPTIONS)
@click.pass_context
def serve(context: click.Context, /, runs_uri: str, if_busy: str, **options: Any) -> None:
    """Serve OpenAI's Batch API. Each batch is a run with the options below. A killed server loses nothing.

    Programs use it as `OpenAI(base_url="http://127.0.0.1:8080/v1", api_key="none")`. Batches continue after a restart.
    Runs are in RUNS/batches, files in RUNS/files.

    \b
    Example:
      swiftbatch serve --runs RUNS --workers 2
      swiftbatch serve usage --runs RUNS
    """
    if context.invoked_subcommand is not None:
        return
    check_engine(context.params)
    _check_server(context.params["metrics_port"], options["max_running"])
    from swiftbatch.jobs.storage.store import Store
    from swiftbatch.scheduler.runs.launch import refuse_runs
    from swiftbatch.scheduler.serve.server import serve

    refuse_runs(_settings(context.params))
    own = ServeOptions(**{field.name: options[field.name] for field in dataclasses.fields(ServeOptions)})
    try:
        serve(Store(runs_uri), own, _driver_options(context), if_busy == "wait", click.echo)
    except KeyboardInterrupt:  # a normal end
        context.exit(INTERRUPTED)


serve.add_command(usage)
serve.params += [option for option in submit.params if option.name not in OF_THE_SERVER]


def _settings(params: dict[str, Any]) -> Settings:
    kinds = (Settings, Computation, CheckpointSettings, Limits)
    names = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    return make_settings(**{name: value for name, value in params.items() if name in names})


def _check_server(metrics_port: int | None, max_running: int) -> None:
    """Raise click.UsageError without the server's packages, or for a port that all drivers would take."""
    if any(find_spec(name) is None for name in NEEDED):
        raise click.UsageError("serve needs more packages; get them with: pip install 'swiftbatch[serve]'")
    if metrics_port and max_running > 1:
        raise click.UsageError(
            f"--metrics-port {metrics_port} with --max-running {max_running}: expected --metrics-port 0, a free port "
            "for each driver; the server's /sd says which they are"
        )


def _driver_options(context: click.Context) -> Any:
    from swiftbatch.scheduler.serve.batches.batch_driver import DriverOptions

    of_start = {option.name for option in resume.params}
    words: dict[bool, list[str]] = {False: [], True: []}
    for option in submit.params:
        if option.name not in OF_THE_SERVER and isinstance(option, click.Option):
            words[option.name in of_start] += _words(context, option)
    params, model = context.params, context.params["model"] or Computation.model
    adapters = tuple(said.partition("=")[0] for said in params["lora"] or ())
    return DriverOptions(tuple(words[False]), tuple(words[True]), params["grace_seconds"], model, adapters)


def _words(context: click.Context, option: click.Option) -> list[str]:
    name = str(option.name)
    value = context.params[name]
    if value is None or context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
        return []
    if option.is_flag:
        return [option.opts[0]]
    if option.multiple:
        return [f"{option.opts[0]}={each}" for each in value]
    return [option.opts[0], *map(str, value if option.nargs > 1 else [value])]
