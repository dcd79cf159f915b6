from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Sequence

import pyte

from tests.scheduler.driving import DEADLINE_SECONDS

UNWANTED = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE")


class Terminal:
    """A command on a screen; the context ends it."""

    def __init__(self, command: Sequence[str], columns: int, num_lines: int, kind: str = "xterm-256color") -> None:
        self.screen = pyte.Screen(columns, num_lines)
        self._stream = pyte.ByteStream(self.screen)
        self._master, slave = pty.openpty()
        self.resize(columns, num_lines)
        environment = {name: value for name, value in os.environ.items() if name not in UNWANTED}
        environment |= {"TERM": kind, "LANG": "C.UTF-8"}
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        os.close(slave)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.close()
        print("\n".join(self.lines()))

    def close(self) -> None:
        if self._master >= 0:
            os.close(self._master)
            self._master = -1

    def resize(self, columns: int, num_lines: int) -> None:
        self.screen.resize(num_lines, columns)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", num_lines, columns, 0, 0))

    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.screen.display]

    def wait_for(self, condition: Callable[[str], object]) -> list[str]:
        """Return the screen's text once the condition holds."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition("\n".join(self.lines())):
            assert time.monotonic() < deadline, "waited in vain"
            assert self._read(), "the command has ended"
        return self.lines()

    def wait(self) -> int:
        while self._read():
            pass
        return self.process.wait(DEADLINE_SECONDS)

    def _read(self) -> bool:
        if not select.select([self._master], [], [], 0.1)[0]:
            return True
        try:
            data = os.read(self._master, 65536)
        except OSError:  # the other end is closed
            return False
        self._stream.feed(data)
        return bool(data)
