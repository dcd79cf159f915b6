"""The folder and processes of an embedded Ray, both removed with the run.

The processes run in sessions of their own, so that Ctrl-C does not end workers before they write checkpoints. If the
driver dies, the kernel ends the processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftbatch.scheduler.process import signals

if TYPE_CHECKING:
    from ray.job_config import JobConfig

LOOPBACK = "127.0.0.1"
PREFIX = "swiftbatch-ray-"
REMOVE_SECONDS = 10.0  # seconds for killed processes to vanish; leftovers go after a day
POLL_SECONDS = 0.05
KEPT_SECONDS = 86_400.0  # age at which logs are removed
LONGEST_PLACE = 18  # characters; Ray's sockets below it may have paths of at most 107
USUAL_PLACE = "/tmp"
AGENTLESS = "2.60."  # Ray versions known to run without agents
NO_AGENT = "cat"  # idles until the raylet closes its input
NO_AGENT_PLACES = "/bin:/usr/bin"  # not PATH, which may be short or contain another `cat`
PIPE = "RAY_enable_pipe_based_agent_to_parent_health_check"  # users may disable this pipe
# ports of the agents: not 0, so that no raylet waits for a report, and unused
PORTS = {
    "dashboard_agent": ("metrics-agent-port", "metrics_export_port", "dashboard_agent_listen_port"),
    "runtime_env_agent": ("runtime_env_agent_port",),
}


class EmbeddedRay:
    def __init__(self) -> None:
        wished = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
        place = Path(wished if len(os.path.abspath(wished)) <= LONGEST_PLACE else USUAL_PLACE)
        _remove_old(place)
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        self._lock = os.open(self.folder, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)  # the kernel releases it whenever this process ends
        self._sessions: set[int] = set()
        self._keeps_folder = False
        self._has_ended = threading.Event()

    @contextlib.contextmanager
    def apart(self, job: JobConfig | None = None) -> Iterator[None]:
        """Start Ray's processes in sessions of their own, and skip needless ones.

        With `job` the node's agents are skipped, too. A node at LOOPBACK listens only there, but `ray.init` would
        replace that address.
        """
        from ray._private import node, parameter, services

        has_ended = self._has_ended.is_set
        known, sessions, params = services.ConsolePopen, self._sessions, parameter.RayParams
        start_api_server, resolve = node.Node.start_api_server, services.resolve_ip_for_localhost

        class Apart(known):  # type: ignore[misc, valid-type]
            def __init__(
                self, command: list[str], *args: Any, preexec_fn: Callable[[], None] | None = None, **options: Any
            ) -> None:
                awaited = signals.ending_signals()

                def prepare() -> None:
                    if preexec_fn is not None:
                        preexec_fn()
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)

                if has_ended():
                    raise ChildProcessError("the command has ended while Ray was starting")
                command = command if job is None else _without_agents(command, job)
                super().__init__(command, *args, preexec_fn=prepare, start_new_session=True, **options)
                sessions.add(self.pid)

        services.ConsolePopen = Apart
        parameter.RayParams = functools.partial(params, no_monitor=True, include_log_monitor=False)
        node.Node.start_api_server = lambda self, **options: None
        services.resolve_ip_for_localhost = lambda host: host
        try:
            yield
        finally:
            services.ConsolePopen = known
            parameter.RayParams = params
            node.Node.start_api_server = start_api_server
            services.resolve_ip_for_localhost = resolve

    def keep_logs(self) -> Path:
        """Keep the folder, because Ray's logs explain a failure."""
        self._keeps_folder = True
        return self.folder

    def end(self) -> None:
        """Kill remaining processes, also those stopped by a signal, and remove the folder."""
        self._has_ended.set()
        signal_sessions(self._sessions, signal.SIGKILL)
        if not self._keeps_folder:
            self._remove_folder()
        os.close(self._lock)

    def _remove_folder(self) -> None:
        """Delete the folder repeatedly, because dying processes may still write files."""
        last = time.monotonic() + REMOVE_SECONDS
        while self.folder.exists() and time.monotonic() < last:
            shutil.rmtree(self.folder, ignore_errors=True)
            if self.folder.exists():
                signal_sessions(self._sessions, signal.SIGKILL)
                time.sleep(POLL_SECONDS)


def _without_agents(command: list[str], job: JobConfig) -> list[str]:
    """Raylets insist on some command."""
    import ray

    agents = ["dashboard_agent"] if job.runtime_env else ["dashboard_agent", "runtime_env_agent"]
    program = shutil.which(NO_AGENT, path=NO_AGENT_PLACES)
    is_raylet = any(word.startswith("--dashboard_agent_c") for word in command)
    has_pipe = os.environ.get(PIPE, "1").lower() in ("1", "true")
    if not (is_raylet and program and has_pipe and ray.__version__.startswith(AGENTLESS)):
        return command
    said = {f"--{agent}_command": program for agent in agents}
    said |= {f"--{port}": "1" for agent in agents for port in PORTS[agent]}
    return [word for word in command if word.partition("=")[0] not in said] + [f"{name}={said[name]}" for name in said]


def signal_sessions(sessions: set[int], number: signal.Signals) -> None:
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(path.name)) in sessions:
                os.kill(int(path.name), number)


def _remove_old(place: Path) -> None:
    for folder in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # it belongs to another user, or is in use
            if time.time() - folder.stat().st_mtime > KEPT_SECONDS and not _is_in_use(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_in_use(folder: Path) -> bool:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
