"""The options that post a run's end, and how a command shows and tells what it does."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from swiftbatch.scheduler.commands.options.option_types import WholeNumber, options_of

if TYPE_CHECKING:
    from swiftbatch.scheduler.display.display import Display, OutputMode
    from swiftbatch.scheduler.display.webhook_post import Receiver


def receiver_of(_context: click.Context, _parameter: click.Parameter, value: str | Receiver | None) -> Receiver | None:
    if value is None:
        return None
    from swiftbatch.scheduler.display.webhook_post import SECRET_VARIABLE, Receiver, ReceiverError

    try:
        return Receiver.parse(value, os.environ.get(SECRET_VARIABLE)) if isinstance(value, str) else value
    except ReceiverError as error:
        raise click.BadParameter(str(error)) from None


output_option = options_of("Output and notifications")

OUTPUT = (
    output_option("--quiet", is_flag=True, help="Only print errors, and one line at the end."),
    output_option(
        "--json", "as_json", is_flag=True, help="Print events as JSON lines: see scheduler/display/EVENTS.md."
    ),
    output_option(
        "--metrics-port",
        type=WholeNumber(0, 65535),
        metavar="PORT",
        help="Serve metrics, and the workers' addresses at /sd (0: any port).",
    ),
    output_option(
        "--metrics-host",
        metavar="ADDRESS",
        help="Serve them here. [default: 127.0.0.1; on a cluster 0.0.0.0]",
    ),
    output_option(
        "--webhook", metavar="URL", callback=receiver_of, help="Post a message when the run ends: see docs/watching.md."
    ),
    output_option("--webhook-jobs", is_flag=True, help="Post a message when each job ends, too."),
)


def shown(options: dict[str, Any]) -> contextlib.AbstractContextManager[Display]:
    """The display of a command, by its options, which are taken out of them. Raises click.UsageError."""
    quiet, as_json = options.pop("quiet"), options.pop("as_json")
    receiver, with_jobs = options.pop("webhook"), options.pop("webhook_jobs")
    if quiet and as_json:
        raise click.UsageError("--quiet and --json: expected at most one of them")
    if with_jobs and receiver is None:
        raise click.UsageError("--webhook-jobs: expected --webhook with it, which says where to")
    return _opened("quiet" if quiet else "json" if as_json else "auto", receiver, with_jobs)


@contextlib.contextmanager
def _opened(mode: OutputMode, receiver: Receiver | None, with_jobs: bool) -> Iterator[Display]:
    from swiftbatch.scheduler.display.display import open_display

    with open_display(mode) as display:
        if receiver is None:
            yield display
            return
        from swiftbatch.scheduler.display.run_webhooks import posting

        with posting(display, receiver, with_jobs) as posting_display:
            yield posting_display
