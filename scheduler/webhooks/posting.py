"""A display that also posts a run's end, and its jobs' ends if asked, from the events that it is given to show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from swiftbatch.jobs.run.records import Progress
from swiftbatch.scheduler.display.display import Display
from swiftbatch.scheduler.display.end_events import RunEnded, WebhookFailed
from swiftbatch.scheduler.display.events import Event, RunOpened
from swiftbatch.scheduler.display.job_events import JobCancelled, JobFinished, JobGivenUp
from swiftbatch.scheduler.webhooks.message import WebhookMessage
from swiftbatch.scheduler.webhooks.receiver import PATIENCE_SECONDS, Receiver
from swiftbatch.scheduler.webhooks.sender import Sender

INTERRUPTED_SECONDS = 5.0  # for the last message, where somebody wants the command to end
STOPPED = 2  # the exit code of a command that can't go on

STATES: dict[type[Event], str] = {JobFinished: "finished", JobGivenUp: "failed", JobCancelled: "cancelled"}


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
