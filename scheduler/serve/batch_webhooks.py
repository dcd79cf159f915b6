"""Tells others of the end of every batch, in threads of its own, again and again, and after a kill where it was.

webhooks/<batch_id>.json    to whom the end of that batch is yet to be told; written before the end itself

Each host has a lane, so that one that is away holds up no other.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from swiftbatch.jobs.backoff import Backoff
from swiftbatch.jobs.frozen_records import Frozen
from swiftbatch.jobs.run.checked_reading import RunError, pretty, read_model
from swiftbatch.jobs.storage.store import Store, StoreError
from swiftbatch.scheduler.display.webhook_post import PostError, ReceiverError, WebhookMessage
from swiftbatch.scheduler.process.streams import Lines
from swiftbatch.scheduler.serve.batches import Batch, Batches
from swiftbatch.scheduler.serve.server_records import is_batch_id
from swiftbatch.scheduler.serve.webhook_hosts import Receivers, Target

WEBHOOKS, SUFFIX = "webhooks", ".json"


class Outstanding(Frozen):
    """`webhooks/<batch_id>.json`."""

    version: Literal[1] = 1
    targets: tuple[Target, ...]


class OutstandingMessages:
    """The outstanding messages of all batches. Every method raises StoreError when the storage fails."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def all(self) -> dict[str, tuple[Target, ...]]:
        """The targets of messages that are outstanding, by the ids of their batches."""
        names = [name.removesuffix(SUFFIX) for name in self._store.list(WEBHOOKS)]
        found = {name: self._read(name) for name in names if is_batch_id(name)}
        return {name: outstanding.targets for name, outstanding in found.items() if outstanding is not None}

    def keep(self, batch_id: str, targets: tuple[Target, ...]) -> None:
        """Keep the targets that are yet to be told of a batch's end; an empty tuple if all were."""
        if targets:
            self._store.write(_path(batch_id), pretty(Outstanding(targets=targets)))
        else:
            self._store.delete(_path(batch_id))

    def _read(self, batch_id: str) -> Outstanding | None:
        try:
            return read_model(self._store, _path(batch_id), Outstanding)
        except RunError:
            return None


def _path(batch_id: str) -> str:
    return f"{WEBHOOKS}/{batch_id}{SUFFIX}"


PAUSES = Backoff(first=5.0, longest=3600.0)

Item = tuple[Batch, Target]
"""A batch, and to whom its end is to be told."""
TRY_SECONDS = 10.0
LOOK_SECONDS = 0.5
GIVEN_UP_SECONDS = 3 * 86400.0  # since the end of the batch
NUM_POSTERS = 4


@dataclass
class Lane:
    """The messages that wait for one host; `not_before` in `time.monotonic()` seconds."""

    items: deque[Item] = field(default_factory=deque)
    is_busy: bool = False
    num_failures: int = 0  # in a row
    not_before: float = 0.0

    def is_due(self) -> bool:
        return bool(self.items) and not self.is_busy and time.monotonic() >= self.not_before

    def succeed(self) -> None:
        """Drop the first message: it was taken, or is given up."""
        self.items.popleft()
        self.num_failures, self.not_before = 0, 0.0

    def fail(self) -> None:
        """Put the first message, which was not taken, behind the others; all of them wait for a while."""
        self.items.rotate(-1)
        self.num_failures += 1
        pause = PAUSES.seconds(self.num_failures) * random.uniform(0.5, 1)  # of many servers not all at once
        self.not_before = time.monotonic() + pause


class Hooks:
    """The messages of one server."""

    def __init__(self, store: Store, receivers: Receivers) -> None:
        self._receivers = receivers
        self._outstanding = OutstandingMessages(store)
        self._targets: dict[str, tuple[Target, ...]] = {}  # by batches
        self._lanes: defaultdict[str, Lane] = defaultdict(Lane)
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._is_stopping = False
        self._posters = ThreadPoolExecutor(NUM_POSTERS, "webhook-poster")
        self._thread = threading.Thread(target=self._run, name="webhooks", daemon=True)

    def prepare(self, batch: Batch) -> None:
        """Keep that the end of a batch, which comes next, is to be told. Raises StoreError."""
        if targets := self._receivers.targets(batch):
            self._outstanding.keep(batch.id, targets)

    def tell(self, batch: Batch) -> None:
        """Tell of the end that a batch has come to."""
        self._add(batch, self._receivers.targets(batch))

    def take_up(self, batches: Batches) -> None:
        """Take up the messages that a server before has left. Raises StoreError."""
        ended = {batch.id: batch for batch in batches.all() if batch.ended is not None}
        for batch_id, targets in self._outstanding.all().items():
            if batch_id in ended:
                self._add(ended[batch_id], targets)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Post nothing more; what is left is in the store."""
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
                self._lanes = defaultdict(Lane, {host: lane for host, lane in self._lanes.items() if lane.items})
            self._news.wait(LOOK_SECONDS)
            self._news.clear()

    def _post_first(self, lane: Lane) -> None:
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
        """Post one message; return the reason why it was not taken, None if it was."""
        try:
            self._receivers.post(self._receivers.of(batch, target), target, message_of(batch), TRY_SECONDS)
        except (PostError, ReceiverError) as error:
            return str(error)
        except Exception as error:  # an error that nobody foresaw must not end the lane
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
        with suppress(StoreError):  # then the next server tells it again, under the same id
            self._outstanding.keep(batch.id, left)


def message_of(batch: Batch) -> WebhookMessage:
    """The message that tells of a batch's end: of OpenAI's kinds, with what its object says of the outcome."""
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
