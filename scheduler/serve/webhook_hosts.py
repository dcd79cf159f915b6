"""The receivers of the message that a batch has ended: hosts that batches may name, and where their addresses lead.

`--webhook-hosts` says the hosts. An address leads out into the world, into the inner network, or where none may post.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from dataclasses import dataclass
from functools import partial
from typing import Literal

from swiftbatch.jobs.errors import UserError
from swiftbatch.scheduler.display.webhook_post import SECRET_VARIABLE, Receiver, ReceiverError, WebhookMessage, post
from swiftbatch.scheduler.serve.batches import Batch
from swiftbatch.scheduler.serve.client_errors import RefusedError

Reach = Literal["public", "private", "loopback", "forbidden"]
"""`forbidden`: link-local (where clouds have their secrets), multicast, unspecified, reserved, and tunnels."""

Target = Literal["server", "batch"]
"""The address of `--webhook` ("server"), or the one that the batch came with ("batch")."""

TUNNELS = tuple(map(ipaddress.IPv6Network, ("2002::/16", "2001::/32", "64:ff9b::/96", "64:ff9b:1::/48")))
NAME = re.compile(r"(\*\.)?[A-Za-z0-9._:-]{1,253}")
ALLOWED: tuple[Reach, ...] = ("private", "loopback")
PUBLIC: frozenset[Reach] = frozenset({"public"})
EXPECTED = "expected hosts with commas between them, as hooks.example.com,*.example.org,10.0.0.5=private"


def reach(address: str) -> Reach:
    """Tell where an address of version 4 or 6 leads; one that is mapped into version 6 is what is mapped."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return reach(str(ip.ipv4_mapped))
        if any(ip in tunnel for tunnel in TUNNELS):
            return "forbidden"
    if ip.is_loopback:
        return "loopback"
    if ip.is_multicast or ip.is_unspecified or ip.is_link_local or ip.is_reserved:
        return "forbidden"
    return "public" if ip.is_global else "private"


def dial(allowed: frozenset[Reach], host: str, port: int, seconds: float) -> socket.socket:
    """A connection to an address of a host that may be reached, the very one that was looked at. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    fit = [address for address in addresses if reach(address) in allowed]
    problem = OSError("none of its addresses may be posted to: see --webhook-hosts")
    for address in fit:
        try:
            return socket.create_connection((address, port), seconds)
        except OSError as error:
            problem = error
    raise problem


class WebhookHostsError(UserError):
    """`--webhook-hosts` can't be used."""


@dataclass(frozen=True)
class WebhookHosts:
    """Names, and where their addresses may lead. `*.example.org` stands for all names below that one."""

    reaches: dict[str, frozenset[Reach]]

    @classmethod
    def parse(cls, text: str) -> WebhookHosts:
        """Parse the value of `--webhook-hosts`. Raises WebhookHostsError."""
        reaches: dict[str, frozenset[Reach]] = {}
        for word in filter(None, map(str.strip, text.split(","))):
            name, equals, reach = word.partition("=")
            if NAME.fullmatch(name) is None or (equals and reach not in ALLOWED):
                raise WebhookHostsError(
                    f"--webhook-hosts: found {word!a}, {EXPECTED} (behind '=': {' or '.join(ALLOWED)})"
                )
            also = [each for each in ALLOWED if each == reach]
            reaches[name.lower()] = reaches.get(name.lower(), PUBLIC).union(also)
        return cls(reaches)

    def allowed(self, host: str) -> frozenset[Reach]:
        """The kinds of addresses that a host may have; empty for a host that may not be named."""
        name = host.lower()
        parents = [f"*.{name.split('.', number)[-1]}" for number in range(1, name.count(".") + 1)]
        return next((self.reaches[each] for each in [name, *parents] if each in self.reaches), frozenset())


class Receivers:
    """The receiver of all batches' ends, if there is one, and those that batches may name."""

    def __init__(self, of_server: Receiver | None, hosts: str | None) -> None:
        """`hosts` is what `--webhook-hosts` says. Raises ReceiverError for a secret, WebhookHostsError."""
        self._of_server = of_server
        self._hosts = WebhookHosts.parse(hosts or "")
        self._secret = os.environ.get(SECRET_VARIABLE)
        if hosts:
            Receiver.parse("https://localhost", self._secret)  # a wrong secret is told now, not at the first end

    def check(self, url: str | None) -> None:
        """Raise RefusedError for an address that a batch may not name."""
        if url is None:
            return
        try:
            self._of_batch(url)
        except ReceiverError as error:
            raise RefusedError(f"webhook: {error}", param="webhook") from None

    def targets(self, batch: Batch) -> tuple[Target, ...]:
        of_server: tuple[Target, ...] = () if self._of_server is None else ("server",)
        return of_server if batch.record.webhook is None else (*of_server, "batch")

    def of(self, batch: Batch, target: Target) -> Receiver:
        """The receiver for a target. Raises ReceiverError if the address may not be posted to any more."""
        if target == "batch":
            return self._of_batch(batch.record.webhook or "")
        if self._of_server is None:
            raise ReceiverError("there is no --webhook any more")
        return self._of_server

    def post(self, receiver: Receiver, target: Target, message: WebhookMessage, seconds: float) -> None:
        """Deliver a message; the address of a batch's receiver is looked at first. Raises PostError."""
        allowed = self._hosts.allowed(receiver.host)
        post(receiver, message, seconds, partial(dial, allowed) if target == "batch" else None)

    def _of_batch(self, url: str) -> Receiver:
        receiver = Receiver.parse(url, self._secret)
        allowed = self._hosts.allowed(receiver.host)
        if not allowed or not _may_be_reached(receiver.host, allowed):
            raise ReceiverError(f"this server does not post to {receiver}: --webhook-hosts says to which hosts it does")
        return receiver


def _may_be_reached(host: str, allowed: frozenset[str]) -> bool:
    """Return whether a host that is an address may be reached; for a name that shows only when it is posted to."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return reach(host) in allowed
