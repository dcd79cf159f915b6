"""The options of `serve` that are about the server itself, and the one that makes a key for it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import click

from swiftbatch.scheduler.commands.options.grouping import Command, options_of
from swiftbatch.scheduler.commands.options.numbers import WholeNumber
from swiftbatch.scheduler.commands.options.webhook import receiver_of
from swiftbatch.scheduler.serve.options import ServeOptions

server_option = options_of("The server")


def _make_key(context: click.Context, _parameter: click.Parameter, name: str | None) -> None:
    """Print a new key's line, for the file, and on standard error its secret, which is kept nowhere."""
    if name is None or context.resilient_parsing:
        return
    from swiftbatch.scheduler.serve.keys.api_key import KeyLineError, make_key

    try:
        secret, line = make_key(name)
    except KeyLineError as error:
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


def serving_options(command: Command) -> Command:
    """The options of the server, for its command."""
    return functools.reduce(lambda made, option: option(made), reversed(OPTIONS), command)


def said_options(options: dict[str, Any]) -> ServeOptions:
    """What was asked for."""
    return ServeOptions(**{field.name: options[field.name] for field in dataclasses.fields(ServeOptions)})
