"""A process that ends with the one that started it, and what it tells that one by its exit code."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

BAD_INPUT = os.EX_DATAERR  # the exit code where the input file as a whole can't be read
SET_DEATH_SIGNAL = 1  # of prctl


def die_with(parent_pid: int) -> None:
    """Have Linux's kernel kill this process when the thread that started it ends, however it does."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)  # it has ended before
