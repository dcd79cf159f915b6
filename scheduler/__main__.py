"""The process of the command `swiftbatch`; it handles signals before anything else."""

from __future__ import annotations

import contextlib
import os
import sys

from swiftbatch.scheduler.process.signals import INTERRUPTED, end_on_signals, interrupt_on_signals
from swiftbatch.scheduler.process.streams import Lines


def main() -> None:
    """Run the command; a signal prints one line and exits with 130."""
    try:
        interrupt_on_signals()
        _open_closed_streams()
        from swiftbatch.scheduler.cli import main as command

        command()
    except Exception as error:
        if not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        _tell_interrupted()  # Python 3.11 wraps an interrupt that a class meets during an import
    except KeyboardInterrupt:  # interrupted before the commands were imported
        _tell_interrupted()
    except SystemExit as end:
        if end.code == INTERRUPTED:
            _end_interrupted()
        raise
    finally:
        end_on_signals()


def _open_closed_streams() -> None:
    """Open `os.devnull` for closed streams, whose numbers other files would get."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8")
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8")


def _tell_interrupted() -> None:
    Lines(sys.stderr).write("interrupted")
    _end_interrupted()


def _end_interrupted() -> None:
    """Skip Python's wait for interrupted work."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
