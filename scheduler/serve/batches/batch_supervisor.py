"""The thread that starts drivers, retries and cancels."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.storage.retries import Backoff
from swiftbatch.jobs.storage.store import StoreError
from swiftbatch.scheduler.process.streams import Lines
from swiftbatch.scheduler.serve.batches.batch_driver import DriverOptions, DriverProcess, driver_arguments
from swiftbatch.scheduler.serve.batches.batch_ending import ask_to_cancel, settle
from swiftbatch.scheduler.serve.batches.batch_queue import Course, Standings, next_batch, usage_so_far
from swiftbatch.scheduler.serve.records.stored_objects import Batch, Batches, StoredFiles

POLL_SECONDS = 0.1
LEASE_CHECK_SECONDS = 5.0  # between two calls of `check_hold`
RESTART_BACKOFF = Backoff(first=1.0, longest=60.0)  # for a batch whose driver failed
GRACE_SLACK_SECONDS = 5.0
NUM_SETTLERS = 4


class BatchSupervisor:
    """Runs one server's batches, at most `max_running` at a time."""

    def __init__(
        self,
        batches: Batches,
        files: StoredFiles,
        options: DriverOptions,
        max_running: int,
        standings: Standings,
        check_hold: Callable[[], None],
        fail: Callable[[Exception], None],
    ) -> None:
        """`check_hold` raises if another server took the runs; `fail` receives the thread's error."""
        self._batches, self._files, self._options = batches, files, options
        self._max_running, self._standings = max_running, standings
        self._check_hold, self._fail = check_hold, fail
        self._next_check = 0.0
        self._courses = {batch.id: Course(batch) for batch in batches.unfinished()}
        self._news = threading.Event()
        self._is_stopping = False
        self._settlers = ThreadPoolExecutor(NUM_SETTLERS, "batch-settler")
        self._thread = threading.Thread(target=self._run, name="batch-keeper")

    def start(self) -> None:
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._is_stopping

    def stop(self) -> None:
        """End all drivers with checkpoints; the next server continues."""
        self._is_stopping = True
        self._news.set()
        self._thread.join()

    def take(self, batch: Batch) -> None:
        self._courses[batch.id] = Course(batch, stage="waiting")
        self._news.set()

    def look_again(self) -> None:
        self._news.set()

    def course(self, batch_id: str) -> Course | None:
        return self._courses.get(batch_id)

    def courses(self) -> list[Course]:
        return list(self._courses.values())

    def drivers(self) -> list[tuple[Batch, DriverProcess]]:
        running = [course for course in self.courses() if course.stage == "running"]
        return [(course.batch, course.driver) for course in running if course.driver is not None]

    def hindrance(self, batch: Batch) -> str | None:
        """Explain why a waiting batch may not begin though others may."""
        course, courses = self.course(batch.id), self.courses()
        if course is None or course.stage != "waiting":
            return None
        num_running = sum(each.stage == "running" for each in courses if each.batch.owner == batch.owner)
        return self._standings.of(batch.owner, courses).hindrance(num_running)

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._step()
                self._news.wait(POLL_SECONDS)
                self._news.clear()
        except Exception as error:
            self._fail(error)
        finally:
            self._end_drivers()
            self._settlers.shutdown(cancel_futures=True)

    def _step(self) -> None:
        self._check_still_held()
        for course in self.courses():
            if course.stage == "running" and course.driver is not None and course.driver.has_ended():
                course.driver.close()
                course.stage = "to_settle"
            self._cancel(course)
            self._settle(course)
            if course.stage == "ended":
                del self._courses[course.batch.id]
                self._standings.add_ended(course.batch)
        while (batch := self._next_batch(self.courses())) is not None:
            self._start_driver(self._courses[batch.id])
            self._standings.forget()

    def _check_still_held(self) -> None:
        """Ignore StoreError, which reveals no other server."""
        if time.monotonic() >= self._next_check:
            with suppress(StoreError):
                self._check_hold()
            self._next_check = time.monotonic() + LEASE_CHECK_SECONDS

    def _cancel(self, course: Course) -> None:
        """Let a driver cancel, or settle a waiting batch."""
        if course.batch.cancellation is None or course.is_asked_to_cancel:
            return
        if course.stage == "waiting":
            course.stage, course.is_asked_to_cancel, course.not_before = "to_settle", True, 0.0
        elif course.stage == "running" and course.driver is not None:
            course.is_asked_to_cancel = True
            self._settlers.submit(ask_to_cancel, course.batch, course.driver)

    def _settle(self, course: Course) -> None:
        """End a batch in another thread."""
        if course.stage == "to_settle" and time.monotonic() >= course.not_before:
            course.stage = "settling"
            course.settling = self._settlers.submit(self._settle_now, course)
        elif course.stage == "settling" and course.settling is not None and course.settling.done():
            try:
                course.stage = "ended" if course.settling.result() else "waiting"
            except UserError as error:
                self._try_later(course, str(error))
                course.stage = "to_settle"
                return
            if course.stage == "waiting" and course.driver is not None:
                self._try_later(course, course.driver.problem or "its driver was killed")

    def _settle_now(self, course: Course) -> bool:
        has_ended = settle(self._batches, self._files, course.batch, course.driver)
        if not has_ended:
            course.usage = usage_so_far(course.batch)
        return has_ended

    def _try_later(self, course: Course, problem: str) -> None:
        course.num_failures += 1
        pause = RESTART_BACKOFF.seconds(course.num_failures)
        course.not_before = time.monotonic() + pause
        course.problem = problem
        Lines(sys.stderr).write(f"{course.batch.id} can't go on: {problem}; tried again in {pause:g} s")

    def _next_batch(self, courses: list[Course]) -> Batch | None:
        running = [course.batch for course in courses if course.stage == "running"]
        waiting = [course.batch for course in courses if course.is_due()]
        return next_batch(waiting, running, self._max_running, lambda owner: self._standings.of(owner, courses))

    def _start_driver(self, course: Course) -> None:
        try:
            arguments = driver_arguments(course.batch, self._files, self._options)
            last = course.driver.events[-1][0] if course.driver and course.driver.events else 0
            course.begin(DriverProcess(arguments, course.batch.store, last))
        except (UserError, OSError) as error:
            self._try_later(course, str(error))

    def _end_drivers(self) -> None:
        drivers = [driver for _, driver in self.drivers()]
        for driver in drivers:
            driver.ask_to_end()
        last = time.monotonic() + self._options.grace_seconds + GRACE_SLACK_SECONDS
        for driver in drivers:
            if not driver.wait(last - time.monotonic()):
                driver.kill()
                driver.wait(GRACE_SLACK_SECONDS)
