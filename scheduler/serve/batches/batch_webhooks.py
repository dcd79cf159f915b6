"""Posts a webhook at each batch's end to allowed hosts."""

from __future__ import annotations

import ipaddress
import os
import random
import re
import socket
import sys
import threading
import time
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.run.run_records import RunError, pretty, read_model
from swiftbatch.jobs.storage.retries import Backoff
from swiftbatch.jobs.storage.store import Store, StoreError
from swiftbatch.scheduler.display.webhooks import (
    SECRET_VARIABLE,
    PostError,
    Receiver,
    ReceiverError,
    WebhookMessage,
    post,
)
from swiftbatch.scheduler.process.streams import Lines
from swiftbatch.scheduler.serve.records.server_records import (
    WEBHOOKS,
    PendingMessage,
    RefusedError,
    Target,
    is_batch_id,
)
from swiftbatch.scheduler.serve.records.stored_objects import Batch, Batches

Reach = Literal["public", "private", "loopback", "forbidden"]
"""`forbidden`: link-local (where clouds have their secrets), multicast, unspecified, reserved, and tunnels."""

TUNNELS = tuple(map(ipaddress.IPv6Network, ("2002::/16", "2001::/32", "64:ff9b::/96", "64:ff9b:1::/48")))
HOST_NAME = re.compile(r"(\*\.)?[A-Za-z0-9._:-]{1,253}")
ALLOWED_REACHES: tuple[Reach, ...] = ("private", "loopback")
PUBLIC: frozenset[Reach] = frozenset({"public"})
EXPECTED_HOSTS = "expected hosts with commas between them, as hooks.example.com,*.example.org,10.0.0.5=private"


def reach(address: str) -> Reach:
    """Classify an IP address; a mapped IPv4 address counts as IPv4."""
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
    """Connect to an allowed address, the same one that was checked. Raises OSError."""
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
    """An unusable `--webhook-hosts`."""


@dataclass(frozen=True)
class WebhookHosts:
    """Allowed host names with the kinds of their addresses."""

    reaches: dict[str, frozenset[Reach]]

    @classmethod
    def parse(cls, text: str) -> WebhookHosts:
        """Parse `--webhook-hosts`. Raises WebhookHostsError."""
        reaches: dict[str, frozenset[Reach]] = {}
        for word in filter(None, map(str.strip, text.split(","))):
            name, equals, reach = word.partition("=")
            if HOST_NAME.fullmatch(name) is None or (equals and reach not in ALLOWED_REACHES):
                raise WebhookHostsError(
                    f"--webhook-hosts: found {word!a}, {EXPECTED_HOSTS} (behind '=': {' or '.join(ALLOWED_REACHES)})"
                )
            also = [each for each in ALLOWED_REACHES if each == reach]
            reaches[name.lower()] = reaches.get(name.lower(), PUBLIC).union(also)
        return cls(reaches)

    def allowed(self, host: str) -> frozenset[Reach]:
        """Return the allowed kinds of a host's addresses."""
        name = host.lower()
        parents = [f"*.{name.split('.', number)[-1]}" for number in range(1, name.count(".") + 1)]
        return next((self.reaches[each] for each in [name, *parents] if each in self.reaches), frozenset())


class Receivers:
    """The server's own receiver, and those that batches name."""

    def __init__(self, of_server: Receiver | None, hosts: str | None) -> None:
        """`hosts` is `--webhook-hosts`. Raises ReceiverError for a bad secret, WebhookHostsError."""
        self._of_server = of_server
        self._hosts = WebhookHosts.parse(hosts or "")
        self._secret = os.environ.get(SECRET_VARIABLE)
        if hosts:
            Receiver.parse("https://localhost", self._secret)  # reports a bad secret now instead of at the first end

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
        """Return a target's receiver. Raises ReceiverError."""
        if target == "batch":
            return self._of_batch(batch.record.webhook or "")
        if self._of_server is None:
            raise ReceiverError("there is no --webhook any more")
        return self._of_server

    def post(self, receiver: Receiver, target: Target, message: WebhookMessage, seconds: float) -> None:
        """Deliver a message. Raises PostError."""
        allowed = self._hosts.allowed(receiver.host)
        post(receiver, message, seconds, partial(dial, allowed) if target == "batch" else None)

    def _of_batch(self, url: str) -> Receiver:
        receiver = Receiver.parse(url, self._secret)
        allowed = self._hosts.allowed(receiver.host)
        if not allowed or not _may_be_reached(receiver.host, allowed):
            raise ReceiverError(f"this server does not post to {receiver}: --webhook-hosts says to which hosts it does")
        return receiver


def _may_be_reached(host: str, allowed: frozenset[Reach]) -> bool:
    """Return whether a host is a name, or an allowed address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return reach(host) in allowed


# Notifications of batch ends, in threads of their own, retried across restarts.


SUFFIX = ".json"
RETRY_BACKOFF = Backoff(first=5.0, longest=3600.0)

Item = tuple[Batch, Target]
"""A batch, and to whom its end is to be told."""
TRY_SECONDS = 10.0
POLL_SECONDS = 0.5
GIVEN_UP_SECONDS = 3 * 86400.0  # since the end of the batch
NUM_POSTERS = 4


@dataclass
class ReceiverQueue:
    """The queued messages of one host; `not_before` in `time.monotonic()` seconds."""

    items: deque[Item] = field(default_factory=deque)
    is_busy: bool = False
    num_failures: int = 0  # in a row
    not_before: float = 0.0

    def is_due(self) -> bool:
        return bool(self.items) and not self.is_busy and time.monotonic() >= self.not_before

    def succeed(self) -> None:
        self.items.popleft()
        self.num_failures, self.not_before = 0, 0.0

    def fail(self) -> None:
        """Move the failed first message to the end and pause."""
        self.items.rotate(-1)
        self.num_failures += 1
        # so that many servers do not retry at once
        pause = RETRY_BACKOFF.seconds(self.num_failures) * random.uniform(0.5, 1)
        self.not_before = time.monotonic() + pause


class BatchWebhooks:
    def __init__(self, store: Store, receivers: Receivers) -> None:
        self._store = store
        self._receivers = receivers
        self._targets: dict[str, tuple[Target, ...]] = {}  # by batch id
        self._lanes: defaultdict[str, ReceiverQueue] = defaultdict(ReceiverQueue)
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._is_stopping = False
        self._posters = ThreadPoolExecutor(NUM_POSTERS, "webhook-poster")
        self._thread = threading.Thread(target=self._run, name="webhooks", daemon=True)

    def prepare(self, batch: Batch) -> None:
        """Save before a batch's end that its messages are pending. Raises StoreError."""
        if targets := self._receivers.targets(batch):
            self._keep(batch.id, targets)

    def tell(self, batch: Batch) -> None:
        self._add(batch, self._receivers.targets(batch))

    def take_up(self, batches: Batches) -> None:
        """Queue the messages left by an earlier server. Raises StoreError."""
        ended = {batch.id: batch for batch in batches.all() if batch.ended is not None}
        for batch_id in [name.removesuffix(SUFFIX) for name in self._store.list(WEBHOOKS)]:
            if is_batch_id(batch_id) and batch_id in ended and (pending := self._read(batch_id)) is not None:
                self._add(ended[batch_id], pending.targets)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop posting; the store keeps the rest."""
        self._is_stopping = True
        self._news.set()
        self._thread.join()
        self._posters.shutdown(cancel_futures=True)

    def _add(self, batch: Batch, targets: tuple[Target, ...]) -> None:
        with self._lock:
            self._targets[batch.id] = targets
            for target in targets:
                try:
                    host = self._receivers.of(batch, target).host
                except ReceiverError as error:
                    self._give_up((batch, target), str(error))
                else:
                    self._lanes[host].items.append((batch, target))
        self._news.set()

    def _run(self) -> None:
        while not self._is_stopping:
            with self._lock:
                for lane in list(self._lanes.values()):
                    if lane.is_due():
                        lane.is_busy = True
                        self._posters.submit(self._post_first, lane)
                self._lanes = defaultdict(
                    ReceiverQueue, {host: lane for host, lane in self._lanes.items() if lane.items}
                )
            self._news.wait(POLL_SECONDS)
            self._news.clear()

    def _post_first(self, lane: ReceiverQueue) -> None:
        batch, target = item = lane.items[0]
        problem = self._try(batch, target)
        with self._lock:
            if problem is None:
                lane.succeed()
                self._forget(item)
            elif batch.ended is not None and time.time() - batch.ended.ended > GIVEN_UP_SECONDS:
                lane.succeed()
                self._give_up(item, problem)
            else:
                if not lane.num_failures:
                    Lines(sys.stderr).write(f"{_shown(item)}: {problem}; tried again, for days")
                lane.fail()
            lane.is_busy = False
        self._news.set()

    def _try(self, batch: Batch, target: Target) -> str | None:
        """Post one message; return why it failed, None if it was taken."""
        try:
            self._receivers.post(self._receivers.of(batch, target), target, message_of(batch), TRY_SECONDS)
        except (PostError, ReceiverError) as error:
            return str(error)
        except Exception as error:  # an unforeseen error must not end the thread
            return type(error).__name__
        return None

    def _give_up(self, item: Item, problem: str) -> None:
        Lines(sys.stderr).write(f"{_shown(item)} is given up: {problem}")
        self._forget(item)

    def _forget(self, item: Item) -> None:
        batch, target = item
        left = self._targets[batch.id] = tuple(each for each in self._targets[batch.id] if each != target)
        if not left:
            del self._targets[batch.id]
        with suppress(StoreError):  # otherwise the next server repeats it with the same id
            self._keep(batch.id, left)

    def _read(self, batch_id: str) -> PendingMessage | None:
        with suppress(RunError):
            return read_model(self._store, _path(batch_id), PendingMessage)
        return None

    def _keep(self, batch_id: str, targets: tuple[Target, ...]) -> None:
        """Save or delete the targets still to notify. Raises StoreError."""
        if targets:
            self._store.write(_path(batch_id), pretty(PendingMessage(targets=targets)))
        else:
            self._store.delete(_path(batch_id))


def _path(batch_id: str) -> str:
    return f"{WEBHOOKS}/{batch_id}{SUFFIX}"


def message_of(batch: Batch) -> WebhookMessage:
    """Return OpenAI's event for a batch's end, with the outcome."""
    ended, record = batch.ended, batch.record
    assert ended is not None
    data = {
        "id": batch.id,
        "status": ended.state,
        "endpoint": record.endpoint,
        "input_file_id": record.input_file_id,
        "output_file_id": ended.output_file_id,
        "error_file_id": ended.error_file_id,
        "request_counts": ended.counts.model_dump(),
        "metadata": record.metadata,
    }
    return WebhookMessage(f"batch.{ended.state}", data, ended.ended)


def _shown(item: Item) -> str:
    batch, target = item
    return f"the webhook of {batch.id} ({'--webhook' if target == 'server' else 'its own'})"
