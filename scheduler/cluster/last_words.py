"""The last lines of a worker that died while it started: nothing else says why."""

from __future__ import annotations

import os
from pathlib import Path

from swiftbatch.scheduler.cluster.bootstrap import STARTING

NUM_LINES = 3
MAX_CHARACTERS = 400
READ_BYTES = 65_536
CRASH = "Fatal Python error"


def last_words(log_folder: str | None, worker_id: str) -> str:
    """The last lines of a worker's log since its process began, to follow a message; "" where there are none."""
    if log_folder is None:
        return ""
    try:
        with (Path(log_folder) / f"{worker_id}.log").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - READ_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    written = text.rpartition(STARTING.partition("{}")[0])[2].splitlines()[1:]
    lines = [" ".join(line.split()) for line in written if line.strip()]
    crash = next((number for number, line in enumerate(lines) if line.startswith(CRASH)), None)
    told = lines[-NUM_LINES:] if crash is None else lines[crash : crash + 1]
    return f"; its last lines: {' | '.join(told)[-MAX_CHARACTERS:]}" if told else ""
