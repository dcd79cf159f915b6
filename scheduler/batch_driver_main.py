"""The command `swiftbatch` as a server's child, with an exit code for a bad input file."""

from __future__ import annotations

import sys

from swiftbatch.jobs.input.job_files import EmptyInputError, InputFileError
from swiftbatch.scheduler.__main__ import main as command
from swiftbatch.scheduler.process.signals import BAD_INPUT, EMPTY_INPUT, die_with


def main(server_pid: int) -> None:
    """Run the command in the process's other arguments."""
    die_with(server_pid)
    try:
        command()
    except SystemExit as end:
        if isinstance(end.__context__, InputFileError):
            sys.exit(EMPTY_INPUT if isinstance(end.__context__, EmptyInputError) else BAD_INPUT)
        raise


if __name__ == "__main__":
    main(int(sys.argv.pop(1)))
