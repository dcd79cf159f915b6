"""Hosts for the nodes of a local cluster: this machine itself, or network namespaces that can be cut off.

A namespace is a host with an address of its own, at one end of a cable whose other end is in a switch. The switch is a
namespace as well, so nothing changes in the machine's own network. Their names begin with this process's number.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from swiftbatch.scheduler.chaos.chaos_options import ChaosError

SUBNET = "10.77.0"  # seen within these namespaces alone
MAX_HOSTS = 250
SWITCH_PORT = "switch"
NAMED = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"')  # a name of its own, then the command


@dataclass(frozen=True)
class Host:
    """The address of a node, and the words in front of a command that is to run there."""

    address: str
    prefix: tuple[str, ...] = ()
    cable: str | None = None  # its end in the switch


class OneHost:
    """This machine, for all nodes alike."""

    num_failed_checks = 2  # a dead node is found in one or two seconds instead of thirteen

    def add(self) -> Host:
        return Host("127.0.0.1")


class NamespaceHosts:
    """A switch, and a namespace for each host."""

    num_failed_checks = 8  # in ten seconds: a node that is cut off for less stays

    def __init__(self) -> None:
        self._switch = f"swiftbatch-{os.getpid()}"
        self._names = [self._switch]

    def open(self) -> None:
        """Make the switch. Raises ChaosError if this process may not, or the machine has no commands for it."""
        for program, package in (("ip", "iproute2"), ("unshare", "util-linux"), ("hostname", "hostname")):
            if shutil.which(program) is None:
                raise ChaosError(f"nodes with networks of their own need `{program}`; install the package {package}")
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", SWITCH_PORT, "type", "bridge")
        _ip("-n", self._switch, "addr", "add", f"{SUBNET}.1/24", "dev", SWITCH_PORT)
        _ip("-n", self._switch, "link", "set", SWITCH_PORT, "up")

    def add(self) -> Host:
        """Make a host, and plug its cable in."""
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
        _ip("-n", name, "route", "add", "default", "via", f"{SUBNET}.1")  # Ray asks the route for its own address
        return Host(address, ("ip", "netns", "exec", name, *NAMED, name), cable)

    def cut(self, host: Host) -> None:
        """Pull a host's cable: whatever is under way to it and from it is lost, and nobody is told."""
        _ip("-n", self._switch, "link", "set", str(host.cable), "down")

    def mend(self, host: Host) -> None:
        _ip("-n", self._switch, "link", "set", str(host.cable), "up")

    def close(self) -> None:
        """Remove all namespaces, with their cables, as far as they are there."""
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
