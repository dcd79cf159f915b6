"""The command `swiftbatch` as a process: signals first, then everything else."""

from __future__ import annotations

import sys

from scheduler.interruption import INTERRUPTED, end_on_signals, interrupt_on_signals


def main() -> None:
    """Run the command that the process's arguments name; a signal at any moment is one line and exit code 130."""
    try:
        interrupt_on_signals()
        from scheduler.cli import main as command

        command()
    except KeyboardInterrupt:  # the commands were not there yet
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    finally:
        end_on_signals()


if __name__ == "__main__":
    main()
