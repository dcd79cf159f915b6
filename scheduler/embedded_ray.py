"""What an embedded Ray leaves outside of this process: a folder, and processes. Both end with the run.

Its processes are in sessions of their own, so that Ctrl-C, a closed terminal or a signal to the process group reach the
driver alone: workers are needed to write their checkpoints. Should the driver die, the kernel ends them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scheduler import interruption

LONGEST_PLACE = 20  # characters: Ray makes sockets below, and their paths may have 107
USUAL_PLACE = "/tmp"


class EmbeddedRay:
    """The folder and the processes of one embedded Ray."""

    def __init__(self) -> None:
        place = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
        self.folder = Path(tempfile.mkdtemp(prefix="swiftbatch-", dir=place if _is_short(place) else USUAL_PLACE))
        self._sessions: set[int] = set()
        self._keeps_folder = False

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Give every process that Ray starts in this context a session of its own."""
        from ray._private import services

        known, sessions = services.ConsolePopen, self._sessions

        class Apart(known):  # type: ignore[misc, valid-type]
            def __init__(self, *args: Any, preexec_fn: Callable[[], None] | None = None, **options: Any) -> None:
                awaited = interruption.signals()

                def prepare() -> None:
                    if preexec_fn is not None:
                        preexec_fn()
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)

                super().__init__(*args, preexec_fn=prepare, start_new_session=True, **options)
                sessions.add(self.pid)

        services.ConsolePopen = Apart
        try:
            yield
        finally:
            services.ConsolePopen = known

    def keep_logs(self) -> Path:
        """Leave the folder where it is, and return it: Ray has failed, and its logs say why."""
        self._keeps_folder = True
        return self.folder

    def end(self) -> None:
        """Kill what still runs, stopped workers too, and remove the folder."""
        kill_sessions(self._sessions)
        if not self._keeps_folder:
            shutil.rmtree(self.folder, ignore_errors=True)


def kill_sessions(sessions: set[int]) -> None:
    """SIGKILL every process of these sessions."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(path.name)) in sessions:
                os.kill(int(path.name), signal.SIGKILL)


def _is_short(place: str) -> bool:
    return len(os.path.abspath(place)) <= LONGEST_PLACE
