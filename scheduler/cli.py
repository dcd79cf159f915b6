"""The `swiftbatch` command; heavy modules are imported when a command needs them."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, TypeGuard

import click

from swiftbatch.jobs.errors import UserError
from swiftbatch.scheduler.commands.bench import bench
from swiftbatch.scheduler.commands.cancel import cancel
from swiftbatch.scheduler.commands.chaos import chaos
from swiftbatch.scheduler.commands.doctor import doctor
from swiftbatch.scheduler.commands.extend import extend
from swiftbatch.scheduler.commands.fork import fork
from swiftbatch.scheduler.commands.inspect import inspect
from swiftbatch.scheduler.commands.nightly import nightly
from swiftbatch.scheduler.commands.prune import prune
from swiftbatch.scheduler.commands.quantize import quantize
from swiftbatch.scheduler.commands.report import report
from swiftbatch.scheduler.commands.results import results
from swiftbatch.scheduler.commands.resume import resume
from swiftbatch.scheduler.commands.score import score
from swiftbatch.scheduler.commands.serve import serve
from swiftbatch.scheduler.commands.status import status
from swiftbatch.scheduler.commands.submit import submit
from swiftbatch.scheduler.commands.tail import tail
from swiftbatch.scheduler.commands.train import train
from swiftbatch.scheduler.commands.verify import verify
from swiftbatch.scheduler.display.progress_line import printable
from swiftbatch.scheduler.process.signals import INTERRUPTED
from swiftbatch.scheduler.process.streams import Lines

USER_ERROR = 2
MAX_LINE = 4000  # characters of an error
SETTINGS = {"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 100}

OUTPUT_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}


class OneLineErrors(click.Group):
    """Prints a user's mistake as one line, with exit code 2."""

    def main(self, *args: Any, **extra: Any) -> NoReturn:
        _prepare_streams()
        try:
            code = super().main(*args, **{**extra, "standalone_mode": False})
            sys.stdout.flush()
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.ctx.get_help())
            code = 0
        except click.ClickException as error:
            _fail(_with_dash_hint(error, args[0] if args else extra.get("args") or sys.argv[1:]))
        except (click.Abort, KeyboardInterrupt) as error:
            hint = (error.__cause__ or error).args  # click raises its own Abort
            Lines(sys.stderr).write(printable("; ".join(["interrupted", *hint])))
            sys.exit(INTERRUPTED)
        except Exception as error:
            if _is_output_error(error):
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # data not flushed yet goes there
                _fail(f"cannot write to standard output: {os.strerror(error.errno or 0)}")
            if not isinstance(error, UserError):
                raise
            _fail(str(error))
        sys.exit(code if isinstance(code, int) else 0)


@click.group(cls=OneLineErrors, context_settings=SETTINGS)
@click.version_option(package_name="swiftbatch")
def main() -> None:
    """Run many long text generation jobs and get exactly the tokens that plain sampling would give.

    \b
    Example:
      swiftbatch submit jobs.jsonl --run my-run --workers 2
      swiftbatch status my-run
      swiftbatch results my-run --output answers.jsonl
    """


OF_RUNS = (submit, nightly, serve, status, tail, results, report, verify, score, resume, extend, fork, cancel, prune)
for command in (*OF_RUNS, inspect, quantize, doctor, train, bench, chaos):
    main.add_command(command)


def _prepare_streams() -> None:
    """Point closed streams at devnull, because other files would get their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def _is_output_error(error: Exception) -> TypeGuard[OSError]:
    """Return whether standard output failed; other files' errors have a name."""
    return isinstance(error, OSError) and error.filename is None and error.errno in OUTPUT_ERRORS


def _with_dash_hint(error: click.ClickException, words: Sequence[str]) -> str:
    """Return the error, and how to name a file that was taken for options."""
    message, files = error.format_message(), [word for word in words if word.startswith("-") and os.path.isfile(word)]
    if not files or not isinstance(error, click.NoSuchOption):
        return message
    return f"{message.removesuffix('.')}; name the file as ./{files[0]}"


def _fail(message: str) -> NoReturn:
    line = printable(" ".join(message.split()))
    Lines(sys.stderr).write(f"swiftbatch: {line if len(line) <= MAX_LINE else line[:MAX_LINE] + '...'}")
    sys.exit(USER_ERROR)


if __name__ == "__main__":
    from swiftbatch.scheduler.__main__ import main as start

    start()
