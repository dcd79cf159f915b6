"""A server without its HTTP: files, batches, how they stand, and who runs them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.run.run_records import RunError
from swiftbatch.jobs.storage.store import Store
from swiftbatch.metrics.counters import ServerCounters
from swiftbatch.scheduler.process.streams import Lines
from swiftbatch.scheduler.serve.api_keys import Keyring, Rights
from swiftbatch.scheduler.serve.batch_driver import DriverOptions
from swiftbatch.scheduler.serve.batch_queue import Stage, Standings
from swiftbatch.scheduler.serve.batch_request import NewBatch
from swiftbatch.scheduler.serve.batch_status import Status, Watcher, unread_status
from swiftbatch.scheduler.serve.batch_supervisor import BatchSupervisor
from swiftbatch.scheduler.serve.batch_webhooks import BatchWebhooks, Receivers
from swiftbatch.scheduler.serve.batches import Batch, Batches
from swiftbatch.scheduler.serve.client_errors import PathRedactor, RefusedError
from swiftbatch.scheduler.serve.server_files import StoredFiles
from swiftbatch.scheduler.serve.server_options import ServeOptions
from swiftbatch.scheduler.serve.server_records import FileRecord

STAGES: dict[Stage, str] = {"to_settle": "ending", "settling": "ending", "waiting": "waiting", "running": "running"}


class Service:
    """The state from which requests are answered."""

    def __init__(
        self,
        runs: Store,
        options: ServeOptions,
        driver_options: DriverOptions,
        check_hold: Callable[[], None],
        fail: Callable[[Exception], None],
    ) -> None:
        """Read what is there. The last two are the keeper's.

        Raises StoreError, and KeyFileError, ReceiverError or WebhookHostsError where an option can't be used.
        """
        self.places = PathRedactor(runs, (*driver_options.of_run, *driver_options.of_start))
        self.max_file_bytes = options.max_file_bytes
        self.keyring = None if options.api_keys is None else Keyring(options.api_keys, Lines(sys.stderr).write)
        self.counters = ServerCounters()
        self.files = StoredFiles(runs)
        self.takes_webhooks = bool(options.webhook_hosts)  # of single batches
        self._receivers = Receivers(options.webhook, options.webhook_hosts)
        self.hooks = BatchWebhooks(runs, self._receivers)
        self.batches = Batches(runs, self._note_end, self.hooks.prepare)
        self.hooks.take_up(self.batches)
        standings = Standings(self.batches.all(), self._rights)
        self.keeper = BatchSupervisor(
            self.batches, self.files, driver_options, options.max_running, standings, check_hold, fail
        )
        self._watchers: dict[str, Watcher] = {}
        self._input_lock = threading.Lock()  # an input does not go away while a batch is made of it

    def start(self) -> None:
        """Run batches, and tell of their ends."""
        self.hooks.start()
        self.keeper.start()

    def stop(self) -> None:
        """End all drivers in good order; what is left undone is in the store."""
        self.hooks.stop()
        self.keeper.stop()

    def _note_end(self, batch: Batch) -> None:
        if batch.ended is not None:
            self.counters.count_ended(batch.ended.state)
        self.hooks.tell(batch)

    def _rights(self, owner: str | None) -> Rights:
        """The rights of an owner; what was made without keys has no limits."""
        return Rights() if self.keyring is None or owner is None else self.keyring.rights(owner)

    def _check_number(self, owner: str | None) -> None:
        """Raise RefusedError if an owner may have no further batch."""
        most = self._rights(owner).max_unfinished
        if most is not None and self.keeper.num_unfinished(owner) >= most:
            problem = f"expected at most {most} unfinished batches of this key: wait for one to end, or cancel one"
            raise RefusedError(problem, 429, code="batch_limit")

    def status(self, batch: Batch) -> Status:
        """The status of a batch; if its run is damaged, that is its problem. Raises StoreError."""
        try:
            return self._watcher(batch).status().shown(self.places.hidden)
        except RunError as error:
            return unread_status(batch, str(error)).shown(self.places.hidden)

    def remembered_status(self, batch: Batch) -> Status | None:
        """The status of a batch, if nothing has to be read for it."""
        status = self._watcher(batch).remembered()
        return None if status is None else status.shown(self.places.hidden)

    def _watcher(self, batch: Batch) -> Watcher:
        """The watcher of a batch, kept until the batch has ended."""
        if batch.ended is not None:
            return self._watchers.pop(batch.id, None) or Watcher(batch)
        return self._watchers.get(batch.id) or self._watchers.setdefault(batch.id, Watcher(batch))

    def problem(self, batch: Batch, status: Status) -> str:
        """The reason why a batch as a whole does not go on, or could not; empty if nothing is known to be wrong."""
        course = self.keeper.course(batch.id)
        known = [each.message for each in status.problems if each.line is None]
        return known[0] if known else "" if course is None else self.places.hidden(course.problem)

    def refusal(self, error: UserError) -> RefusedError:
        """The error that a client is told for an error behind its request."""
        if isinstance(error, RefusedError):
            return error
        told = self.places.hidden(str(error))
        if isinstance(error, RunError):  # it stays so
            return RefusedError(told, 409, code="damaged_run")
        return RefusedError(told, 503, code="not_available")

    def create_batch(self, new: NewBatch, owner: str | None, key: str | None = None) -> Batch:
        """A new batch, to be run, or that of an earlier request with this key. Raises RefusedError, StoreError."""
        seconds, input_file_id = new.seconds, new.input_file_id
        self._receivers.check(new.webhook)
        with self._input_lock:
            if key is None or self.batches.with_key(owner, key) is None:
                self._check_number(owner)
                self._check_input(input_file_id, owner)
            batch = self.batches.create(
                input_file_id,
                new.endpoint,
                new.completion_window,
                seconds,
                new.metadata,
                owner,
                new.priority,
                new.webhook,
                key,
            )
            if self.keeper.course(batch.id) is None and batch.ended is None:
                self.keeper.take(batch)
        return batch

    def _check_input(self, file_id: str, owner: str | None) -> None:
        """Raise RefusedError where a file can't be the input of a batch."""
        file = self.files.get(file_id, owner, "input_file_id")
        self.files.check(file)
        if file.purpose != "batch":
            raise RefusedError(f"input_file_id: {file_id} has another purpose than batch", param="input_file_id")

    def cancel_batch(self, batch: Batch) -> None:
        """Request that a batch is cancelled. Raises StoreError."""
        self.batches.request_cancel(batch)
        self.keeper.look_again()

    def delete_file(self, record: FileRecord) -> None:
        """Delete a file. Raises RefusedError for the input of a batch that has not ended, StoreError."""
        with self._input_lock:
            for batch in self.batches.unfinished():
                if batch.record.input_file_id == record.id:
                    raise RefusedError(f"{record.id} is the input of {batch.id}, which has not ended", 409, "file_id")
            self.files.delete(record)

    def count_batches(self) -> None:
        """Bring the numbers of unfinished batches up to date."""
        counts = dict.fromkeys(STAGES.values(), 0)
        for stage in self.keeper.stages():
            if stage in STAGES:
                counts[STAGES[stage]] += 1
        self.counters.batches = counts
