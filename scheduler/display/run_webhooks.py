"""Posts a run's end, and its jobs' ends if asked, from the events that a display is given to show.

A thread of its own delivers them, so that nobody waits for a receiver, but for a bounded time at the end.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from tenacity import RetryCallState, Retrying, retry_if_exception

from swiftbatch.jobs.backoff import Backoff
from swiftbatch.jobs.run.run_records import Progress
from swiftbatch.scheduler.display.display import Display
from swiftbatch.scheduler.display.events import Event, RunEnded, RunOpened, WebhookFailed
from swiftbatch.scheduler.display.job_events import JobCancelled, JobFinished, JobGivenUp
from swiftbatch.scheduler.display.webhook_post import (
    PATIENCE_SECONDS,
    PostError,
    PostRefusedError,
    Receiver,
    WebhookMessage,
    post,
)

TRY_SECONDS = 5.0
MESSAGE_SECONDS = 60.0  # in which a message is tried while the run goes on
MOST_WAITING = 1000  # messages: those beyond are lost
SLACK_SECONDS = 0.3  # for the last try to say how it failed
LEAST_SECONDS = 1.0  # for a last message where a command's patience is used up
PAUSE = Backoff(first=0.5, longest=10.0).at_random
INTERRUPTED_SECONDS = 5.0  # for the last message, where somebody wants the command to end
STOPPED = 2  # the exit code of a command that can't go on

STATES: dict[type[Event], str] = {JobFinished: "finished", JobGivenUp: "failed", JobCancelled: "cancelled"}


class Sender:
    """Takes messages, and delivers each at most once. `failure` says why the first one was lost, if one was."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._waiting: deque[WebhookMessage] = deque()
        self._has_news = threading.Condition()
        self._last: WebhookMessage | None = None
        self._end_by = float("inf")  # in `time.monotonic()` seconds
        self._is_ending, self._has_ended = threading.Event(), threading.Event()
        self.failure: str | None = None
        threading.Thread(target=self._run, name="webhook", daemon=True).start()

    def put(self, message: WebhookMessage) -> None:
        """Have a message delivered soon."""
        with self._has_news:
            if len(self._waiting) >= MOST_WAITING:
                self._lose(f"more than {MOST_WAITING:,} messages wait")
                return
            self._waiting.append(message)
            self._has_news.notify()

    def finish(self, message: WebhookMessage, seconds: float) -> None:
        """Deliver a last message before all that wait, then those; give up what is left after `seconds`.

        What is waited in vain is taken off the receiver's patience.
        """
        started = time.monotonic()
        with self._has_news:
            self._waiting.appendleft(message)
            self._last = message
            self._end_by = started + max(LEAST_SECONDS, min(seconds, self._receiver.patience))
            self._is_ending.set()
            self._has_news.notify()
        if not self._has_ended.wait(self._end_by - started + SLACK_SECONDS):
            self._lose("it took no message in time")
        if self.failure is not None:
            self._receiver.patience -= time.monotonic() - started

    def _run(self) -> None:
        while (message := self._next()) is not None:
            tries = Retrying(
                stop=partial(self._is_over, message),
                wait=PAUSE,
                sleep=self._sleep,
                retry=retry_if_exception(lambda error: not isinstance(error, PostRefusedError)),
                reraise=True,
            )
            try:
                tries(self._try, message)
            except PostError as error:
                self._lose(str(error))
            except Exception as error:  # an error that nobody foresaw must not be silence
                self._lose(type(error).__name__)
        self._has_ended.set()

    def _next(self) -> WebhookMessage | None:
        with self._has_news:
            while not self._waiting and not self._is_ending.is_set():
                self._has_news.wait()
            if self._waiting and time.monotonic() >= self._end_by:
                self._lose(f"it was too slow for the last {len(self._waiting):,}")
                return None
            return self._waiting.popleft() if self._waiting else None

    def _try(self, message: WebhookMessage) -> None:
        left = self._end_by - time.monotonic()
        post(self._receiver, message, max(0.1, min(TRY_SECONDS, left)))

    def _is_over(self, message: WebhookMessage, state: RetryCallState) -> bool:
        """Return whether a message that was not taken is given up."""
        if self._is_ending.is_set():
            return message is not self._last or time.monotonic() >= self._end_by
        return (state.seconds_since_start or 0.0) >= MESSAGE_SECONDS

    def _sleep(self, seconds: float) -> None:
        """Wait between two tries, but only until the end is near, and from then on in short pauses."""
        if self._is_ending.is_set():
            time.sleep(min(seconds, max(0.0, self._end_by - time.monotonic())))
        else:
            self._is_ending.wait(seconds)

    def _lose(self, reason: str) -> None:
        self.failure = self.failure or reason


class PostingDisplay:
    """Shows all on another display, and posts what is of interest elsewhere. A failure is told of once."""

    def __init__(self, display: Display, receiver: Receiver, with_jobs: bool) -> None:
        self._display = display
        self._receiver = receiver
        self._with_jobs = with_jobs
        self._sender = Sender(receiver)
        self._run: dict[str, Any] = {}
        self._newest: Progress | None = None
        self._is_told = False

    def note(self, event: Event) -> None:
        self._display.note(event)
        if isinstance(event, RunOpened):
            self._run = {"run_id": event.run_id, "run": event.run}
        elif isinstance(event, RunEnded):
            self._post_end(event.state, event.jobs, event.num_tokens, event.limit, event.exit_code)
        elif self._with_jobs and type(event) in STATES:
            self._post_job(event)
        self._tell_failure()

    def update(self, progress: Progress) -> None:
        self._newest = progress
        self._display.update(progress)
        self._tell_failure()

    def post_error(self) -> None:
        """Post that the run had to stop; the reason is on its own terminal."""
        newest = self._newest
        jobs, num_tokens = ({}, 0) if newest is None else (newest.jobs, newest.num_generated_tokens)
        self._post_end("interrupted", jobs, num_tokens, None, STOPPED)
        self._tell_failure()

    def _post_end(self, state: str, jobs: dict[str, int], num_tokens: int, limit: str | None, exit_code: int) -> None:
        if not self._run:  # it was refused before there was one
            return
        data = self._run | {"state": state, "jobs": jobs, "num_tokens": num_tokens, "limit": limit}
        is_hurried = state == "interrupted" and limit is None
        seconds = INTERRUPTED_SECONDS if is_hurried else PATIENCE_SECONDS
        self._sender.finish(WebhookMessage("run.ended", data | {"exit_code": exit_code}), seconds)

    def _post_job(self, event: Event) -> None:
        fields = {name: value for name, value in vars(event).items() if name in ("custom_id", "num_tokens")}
        self._sender.put(WebhookMessage("job.ended", self._run | fields | {"state": STATES[type(event)]}))

    def _tell_failure(self) -> None:
        if self._sender.failure is not None and not self._is_told:
            self._is_told = True
            self._display.note(WebhookFailed(str(self._receiver), self._sender.failure))


@contextmanager
def posting(display: Display, receiver: Receiver, with_jobs: bool) -> Iterator[Display]:
    """The display with messages to a receiver; an error that ends the block is posted as the run's end."""
    posting_display = PostingDisplay(display, receiver, with_jobs)
    try:
        yield posting_display
    except Exception:
        posting_display.post_error()
        raise
