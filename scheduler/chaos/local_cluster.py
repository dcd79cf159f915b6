"""A Ray cluster of several nodes on this machine."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from swiftbatch.jobs.python_processes import environment_of_code
from swiftbatch.scheduler.chaos.chaos_options import ChaosError
from swiftbatch.scheduler.cluster.embedded_ray import signal_sessions
from swiftbatch.scheduler.cluster.ray_cluster import OBJECT_STORE_BYTES

SUBNET = "10.77.0"  # visible only inside these namespaces
MAX_HOSTS = 250
SWITCH_PORT = "switch"
NAMED = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"')  # sets a host name, then runs the command


@dataclass(frozen=True)
class Host:
    """A node's address, and the command prefix to run there."""

    address: str
    prefix: tuple[str, ...] = ()
    cable: str | None = None  # its end in the switch


class OneHost:
    """This machine, shared by all nodes."""

    num_failed_checks = 2  # finds a dead node in one or two seconds instead of thirteen

    def add(self) -> Host:
        return Host("127.0.0.1")


class NamespaceHosts:
    """A virtual switch, and a network namespace for each host."""

    num_failed_checks = 8  # ten seconds: a node that is cut off for less stays

    def __init__(self) -> None:
        self._switch = f"swiftbatch-{os.getpid()}"
        self._names = [self._switch]

    def open(self) -> None:
        """Make the switch. Raises ChaosError if the rights or the commands for it are missing."""
        for program, package in (("ip", "iproute2"), ("unshare", "util-linux"), ("hostname", "hostname")):
            if shutil.which(program) is None:
                raise ChaosError(f"nodes with networks of their own need `{program}`; install the package {package}")
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", SWITCH_PORT, "type", "bridge")
        _ip("-n", self._switch, "addr", "add", f"{SUBNET}.1/24", "dev", SWITCH_PORT)
        _ip("-n", self._switch, "link", "set", SWITCH_PORT, "up")

    def add(self) -> Host:
        """Make a host and connect it."""
        number = len(self._names)
        if number > MAX_HOSTS:
            raise ChaosError(f"{MAX_HOSTS} hosts were made, and no more fit into one network; plan fewer kills")
        name, cable, address = f"{self._switch}-{number}", f"host{number}", f"{SUBNET}.{number + 1}"
        _ip("netns", "add", name)
        self._names.append(name)
        _ip("-n", self._switch, "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("-n", self._switch, "link", "set", cable, "master", SWITCH_PORT, "up")
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", name, "link", "set", device, "up")
        _ip("-n", name, "route", "add", "default", "via", f"{SUBNET}.1")  # Ray finds its own address by this route
        return Host(address, ("ip", "netns", "exec", name, *NAMED, name), cable)

    def cut(self, host: Host) -> None:
        """Disconnect a host without notice; packets on the way are lost."""
        _ip("-n", self._switch, "link", "set", str(host.cable), "down")

    def mend(self, host: Host) -> None:
        _ip("-n", self._switch, "link", "set", str(host.cable), "up")

    def close(self) -> None:
        for name in reversed(self._names):
            with contextlib.suppress(ChaosError):
                _ip("netns", "delete", name)


Hosts = OneHost | NamespaceHosts


@contextlib.contextmanager
def namespace_hosts() -> Iterator[NamespaceHosts]:
    hosts = NamespaceHosts()
    try:
        hosts.open()
        yield hosts
    finally:
        hosts.close()


def _ip(*args: str) -> None:
    command: Sequence[str] = ("ip", *args)
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise ChaosError(f"nodes with networks of their own need root: `{' '.join(command)}` fails: {reason}")


# A local Ray cluster whose nodes can be killed, stopped and cut off.


NUM_RAYLETS = 2  # the run continues without one of them
START_SECONDS = 60.0
NUM_STARTS = 4  # Ray gives a start up after half a minute, which a busy machine may need
STOP_SECONDS = 5.0
STARTED = b"Ray runtime started"
HEAD_OPTIONS = ("--include-dashboard=false", "--no-monitor")
HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
}


@dataclass(eq=False)
class Node:
    """One `ray start --block` and its output."""

    process: subprocess.Popen[bytes]
    log: Path
    host: Host

    def wait_until_up(self) -> None:
        """Raise ChaosError if the node does not start in time."""
        deadline = time.monotonic() + START_SECONDS
        while STARTED not in self.log.read_bytes():
            if self.process.poll() is not None or time.monotonic() > deadline:
                last = (self.log.read_text(errors="replace").strip().splitlines() or ["nothing was printed"])[-1]
                raise ChaosError(f"a node of the local Ray cluster does not start: {last}")
            time.sleep(0.05)

    def kill(self) -> None:
        """Kill the node's processes with SIGKILL, except workers, which notice later."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Signal all processes at once, workers too, as if the machine hung."""
        for _ in range(2):  # the second pass catches processes that were just starting
            signal_sessions({self.process.pid}, number)

    def stop(self) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SECONDS)
        self.kill()


class LocalCluster:
    """A head without CPUs or workers, and raylets with `num_cpus`."""

    def __init__(self, folder: Path, num_cpus: int, hosts: Hosts) -> None:
        self._folder = folder
        self._num_cpus = num_cpus
        self._hosts = hosts
        self._num_started = 0
        self._sessions: set[int] = set()
        self._port = _free_port()
        self.head_host = hosts.add()
        self.address = f"{self.head_host.address}:{self._port}"
        self.environment = cluster_environment(hosts.num_failed_checks)
        self.head: Node | None = None
        self.raylets: list[Node] = []

    def start_head(self) -> None:
        """Start the head and wait: a raylet that comes earlier never joins."""
        self.head = self._start(self.head_host, "--head", f"--port={self._port}", "--num-cpus=0", *HEAD_OPTIONS)
        self.head.wait_until_up()

    def add_raylet(self) -> Node:
        node = self._start(self._hosts.add(), f"--address={self.address}", f"--num-cpus={self._num_cpus}")
        self.raylets.append(node)
        return node

    def wait_for(self, node: Node) -> None:
        """Wait until a raylet is up. Raises ChaosError."""
        for _ in range(NUM_STARTS - 1):
            try:
                return node.wait_until_up()
            except ChaosError:
                self.kill_raylet(node)
                node = self.add_raylet()
        return node.wait_until_up()

    def kill_raylet(self, node: Node) -> None:
        self.raylets.remove(node)
        node.kill()

    def replace_ended(self) -> None:
        for node in [node for node in self.raylets if node.process.poll() is not None]:
            self.kill_raylet(node)
            self.add_raylet()

    def node_of(self, pid: int) -> Node | None:
        """Return the node whose raylet started a worker process, if any."""
        try:
            session = os.getsid(pid)
        except ProcessLookupError:
            return None
        return next((node for node in self.raylets if node.process.pid == session), None)

    def stop(self) -> None:
        """End all nodes, and suspended workers, which could not notice the end of their node."""
        for node in self.raylets:
            node.stop()
        if self.head is not None:
            self.head.stop()
        signal_sessions(self._sessions, signal.SIGKILL)

    def _start(self, host: Host, *args: str) -> Node:
        self._num_started += 1
        # one folder each: nodes that start together would take the same sockets
        folder = self._folder / str(self._num_started)
        folder.mkdir()
        log = folder / "node.log"
        log.touch()
        command = [*host.prefix, sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        command += [f"--temp-dir={folder}", f"--node-ip-address={host.address}"]
        command += [f"--object-store-memory={OBJECT_STORE_BYTES}"]
        # 0 avoids port clashes
        command += ["--include-log-monitor=false", "--min-worker-port=0", "--max-worker-port=0"]
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*command, *args],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._sessions.add(process.pid)
        return Node(process, log, host)


@contextlib.contextmanager
def local_cluster(num_cpus: int, num_raylets: int = NUM_RAYLETS, hosts: Hosts | None = None) -> Iterator[LocalCluster]:
    """Yield a running local cluster. Raises ChaosError."""
    # not in TMPDIR: Ray's sockets below it may have paths of at most 107 characters
    with tempfile.TemporaryDirectory(prefix="sb-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        cluster = LocalCluster(Path(folder), num_cpus, hosts or OneHost())
        try:
            cluster.start_head()
            for node in [cluster.add_raylet() for _ in range(num_raylets)]:
                cluster.wait_for(node)
            yield cluster
        finally:
            cluster.stop()


def cluster_environment(num_failed_checks: int) -> dict[str, str]:
    """Return the environment variables of a cluster whose head declares nodes dead after `num_failed_checks`."""
    environment = {name: value for name, value in environment_of_code().items() if name != "RAY_ADDRESS"}
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    settings["RAY_health_check_failure_threshold"] = str(num_failed_checks)
    return environment | HEALTH_CHECKS | secret | settings


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
