"""A server without HTTP: files, batches, their status and their supervisor."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from html import escape

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.run.run_records import RunError
from swiftbatch.jobs.storage.folder_uri import local_path
from swiftbatch.jobs.storage.store import Store, StoreError
from swiftbatch.metrics.server_counters import ServerCounters
from swiftbatch.scheduler.process.streams import Lines
from swiftbatch.scheduler.runs.run_settings import ServeOptions
from swiftbatch.scheduler.serve.batches.batch_driver import DriverOptions
from swiftbatch.scheduler.serve.batches.batch_queue import Stage, Standings, Usage, usage_of
from swiftbatch.scheduler.serve.batches.batch_supervisor import BatchSupervisor
from swiftbatch.scheduler.serve.batches.batch_webhooks import BatchWebhooks, Receivers
from swiftbatch.scheduler.serve.batches.team_usage import usage_of_teams
from swiftbatch.scheduler.serve.records.api_keys import Keyring, Rights
from swiftbatch.scheduler.serve.records.audit_log import AuditLog, Sender
from swiftbatch.scheduler.serve.records.batch_status import Status, Watcher, model_id, unread_status
from swiftbatch.scheduler.serve.records.server_records import FileRecord, NewBatch, RefusedError
from swiftbatch.scheduler.serve.records.stored_objects import Batch, Batches, StoredFiles

RUNS = "the folder of runs"
MAX_TEAMS, OTHER_TEAMS = 100, "other"
STAGES: dict[Stage, str] = {"to_settle": "ending", "settling": "ending", "waiting": "waiting", "running": "running"}


class PathRedactor:
    """Removes a server's paths from texts, also inside JSON and HTML."""

    def __init__(self, runs: Store, words: Iterable[str]) -> None:
        """A path among the command line's `words` is cut to its last name."""
        shown = {uri.rstrip("/") for uri in (runs.uri, runs.shown_uri) if "/" in uri}
        names = dict.fromkeys(shown, RUNS) | {f"{uri}/": "" for uri in shown}
        names |= {
            word: word.rstrip("/").rpartition("/")[2] for word in words if word.startswith("/") and word.strip("/")
        }
        forms = {form(place): name for place, name in names.items() for form in (str, _in_json, escape)}
        self._names = sorted(forms.items(), key=lambda each: len(each[0]), reverse=True)

    def hidden(self, text: str) -> str:
        for place, name in self._names:
            text = text.replace(place, name)
        return text


def _in_json(text: str) -> str:
    return json.dumps(text)[1:-1]


class Service:
    def __init__(
        self,
        runs: Store,
        options: ServeOptions,
        driver_options: DriverOptions,
        check_hold: Callable[[], None],
        fail: Callable[[Exception], None],
    ) -> None:
        """Read the folder. Raises StoreError, ApiKeyError, ReceiverError, WebhookHostsError."""
        self.places = PathRedactor(runs, (*driver_options.of_run, *driver_options.of_start))
        self.max_file_bytes = options.max_file_bytes
        self.model, self.started = model_id(driver_options.model), time.time()
        self.adapters = driver_options.adapters
        self.keyring = None if options.api_keys is None else Keyring(options.api_keys, Lines(sys.stderr).write)
        self.audit = AuditLog(runs, has_keys=self.keyring is not None)
        self.counters = ServerCounters()
        self._folder = local_path(runs.uri)
        self._teams: set[str] = set()
        self.files = StoredFiles(runs)
        self.takes_webhooks = bool(options.webhook_hosts)  # whether batches may name webhooks
        self._receivers = Receivers(options.webhook, options.webhook_hosts)
        self.hooks = BatchWebhooks(runs, self._receivers)
        self.batches = Batches(runs, self._note_end, self.hooks.prepare)
        self.hooks.take_up(self.batches)
        for batch in self.batches.all():  # in an order that each start repeats
            self.team_labels(batch.owner)
        standings = Standings(self.batches.all(), self._rights)
        self.keeper = BatchSupervisor(
            self.batches, self.files, driver_options, options.max_running, standings, check_hold, fail
        )
        self._watchers: dict[str, Watcher] = {}
        self._input_lock = threading.Lock()  # keeps an input from being deleted while a batch is created

    def start(self) -> None:
        self.hooks.start()
        self.keeper.start()

    def stop(self) -> None:
        """End all drivers with checkpoints; the store keeps the rest."""
        self.hooks.stop()
        self.keeper.stop()

    def _note_end(self, batch: Batch) -> None:
        if batch.ended is not None:
            self.counters.count_ended(batch.ended.state)
        self.hooks.tell(batch)

    def _rights(self, owner: str | None) -> Rights:
        return Rights() if self.keyring is None or owner is None else self.keyring.rights(owner)

    def _check_number(self, owner: str | None) -> None:
        """Raise RefusedError if the owner has too many unfinished batches."""
        most = self._rights(owner).max_unfinished
        if most is not None and sum(course.batch.owner == owner for course in self.keeper.courses()) >= most:
            problem = f"expected at most {most} unfinished batches of this key: wait for one to end, or cancel one"
            raise RefusedError(problem, 429, code="batch_limit")

    def status(self, batch: Batch) -> Status:
        """Return a batch's status; a damaged run becomes its problem. Raises StoreError."""
        try:
            return self._watcher(batch).status().shown(self.places.hidden)
        except RunError as error:
            return unread_status(batch, str(error)).shown(self.places.hidden)

    def remembered_status(self, batch: Batch) -> Status | None:
        status = self._watcher(batch).remembered()
        return None if status is None else status.shown(self.places.hidden)

    def _watcher(self, batch: Batch) -> Watcher:
        if batch.ended is not None:
            return self._watchers.pop(batch.id, None) or Watcher(batch)
        return self._watchers.get(batch.id) or self._watchers.setdefault(batch.id, Watcher(batch))

    def problem(self, batch: Batch, status: Status) -> str:
        """Return why a whole batch is stuck or failed."""
        course = self.keeper.course(batch.id)
        known = [each.message for each in status.problems if each.line is None]
        return known[0] if known else "" if course is None else self.places.hidden(course.problem)

    def refusal(self, error: UserError) -> RefusedError:
        if isinstance(error, RefusedError):
            return error
        told = self.places.hidden(str(error))
        if isinstance(error, RunError):  # a retry would not help
            return RefusedError(told, 409, code="damaged_run")
        return RefusedError(told, 503, code="not_available")

    def create_batch(self, new: NewBatch, sender: Sender, key: str | None = None) -> Batch:
        """Create and run a batch, or return an earlier request's. Raises RefusedError, StoreError."""
        seconds, owner = new.seconds, sender.name
        self._receivers.check(new.webhook)
        with self._input_lock:
            if key is None or self.batches.with_key(owner, key) is None:
                self._check_number(owner)
                self._check_input(new.input_file_id, owner)
            batch = self.batches.create(new, seconds, owner, key)
            if self.keeper.course(batch.id) is None and batch.ended is None:
                self.keeper.take(batch)
                self.audit.write(sender, "created", batch.id)
        return batch

    def _check_input(self, file_id: str, owner: str | None) -> None:
        """Raise RefusedError if a file can't be a batch's input."""
        file = self.files.get(file_id, owner, "input_file_id")
        self.files.check(file)
        if file.purpose != "batch":
            raise RefusedError(f"input_file_id: {file_id} has another purpose than batch", param="input_file_id")

    def cancel_batch(self, batch: Batch, sender: Sender) -> None:
        """Request a batch's cancellation. Raises StoreError."""
        if self.batches.request_cancel(batch, sender.name):
            self.keeper.look_again()
            self.audit.write(sender, "cancelled", batch.id)

    def delete_file(self, record: FileRecord, sender: Sender) -> None:
        """Delete a file. Raises RefusedError for the input of an unfinished batch."""
        with self._input_lock:
            for batch in self.batches.unfinished():
                if batch.record.input_file_id == record.id:
                    raise RefusedError(f"{record.id} is the input of {batch.id}, which has not ended", 409, "file_id")
            self.files.delete(record)
        self.audit.write(sender, "deleted", record.id)

    def team_labels(self, owner: str | None) -> dict[str, str]:
        """Return the label of a key's metrics; Prometheus keeps a series for each."""
        if owner is None:
            return {}
        if len(self._teams) < MAX_TEAMS:
            self._teams.add(owner)
        return {"team": owner if owner in self._teams else OTHER_TEAMS}

    def _usage(self, batch: Batch) -> Usage | None:
        """Return what a batch has used; only waiting ones need no look, so that a restart counts the same."""
        course = self.keeper.course(batch.id)
        if batch.ended is None and course is not None:
            if course.stage != "waiting":
                with suppress(StoreError):
                    course.usage = usage_of(batch) or course.usage
            return course.usage
        return usage_of(batch)

    def _measure_teams(self) -> None:
        batches = self.batches.all()
        labels = (self.team_labels(batch.owner).get("team", "") for batch in batches)
        sums = usage_of_teams(zip(labels, map(self._usage, batches), strict=True)).items()
        self.counters.team_input_tokens = {team: used.num_input_tokens for team, used in sums}
        self.counters.team_output_tokens = {team: used.num_output_tokens for team, used in sums}
        self.counters.team_generated_tokens = {team: used.num_generated_tokens for team, used in sums}
        self.counters.team_worker_seconds = {team: used.worker_seconds for team, used in sums}

    def measure(self) -> None:
        """Update the gauges."""
        counts = dict.fromkeys(STAGES.values(), 0)
        now = oldest = time.time()
        for course in self.keeper.courses():
            if course.stage in STAGES:
                counts[STAGES[course.stage]] += 1
            if course.stage == "waiting":
                oldest = min(oldest, course.batch.created)
        self.counters.batches, self.counters.oldest_waiting_seconds = counts, now - oldest
        self._measure_teams()
        if self._folder is not None:
            disk = shutil.disk_usage(self._folder)
            self.counters.disk = {"used": disk.used, "free": disk.free}
