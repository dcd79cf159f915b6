from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def held_elsewhere(runs: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process that holds the runs until its input ends."""
    program = (
        "import sys; from swiftbatch.jobs.storage.store import Store\n"
        "from swiftbatch.scheduler.runs.folder_lock import hold\n"
        "with hold(Store(sys.argv[1]), False, 'nightly'): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(runs)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()
