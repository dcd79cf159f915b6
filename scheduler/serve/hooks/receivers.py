"""The receivers of the message that a batch has ended, and their addresses."""

from __future__ import annotations

import ipaddress
import os
from functools import partial

from swiftbatch.scheduler.serve.batches import Batch
from swiftbatch.scheduler.serve.hooks.addresses import dial, reach
from swiftbatch.scheduler.serve.hooks.hook_hosts import WebhookHosts
from swiftbatch.scheduler.serve.hooks.outstanding import Target
from swiftbatch.scheduler.serve.refusals import RefusedError
from swiftbatch.scheduler.webhooks.post import WebhookMessage, post
from swiftbatch.scheduler.webhooks.receiver import SECRET_VARIABLE, Receiver, ReceiverError


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
