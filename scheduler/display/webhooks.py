"""Webhooks: receivers, signed messages, delivery, and a run's messages."""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import hmac
import http.client
import json
import re
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any
from urllib.parse import SplitResult, urlsplit

from tenacity import RetryCallState, Retrying, retry_if_exception

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.run.run_records import Progress
from swiftbatch.jobs.storage.retries import Backoff
from swiftbatch.scheduler.display.display import Display
from swiftbatch.scheduler.display.events import (
    Event,
    JobCancelled,
    JobFinished,
    JobGivenUp,
    RunEnded,
    RunOpened,
    WebhookFailed,
)

SECRET_VARIABLE = "SWIFTBATCH_WEBHOOK_SECRET"
SECRET_PREFIX = "whsec_"
KEY_BYTES = range(24, 65)  # from Standard Webhooks
PATIENCE_SECONDS = 30.0
HOW_TO_MAKE_ONE = 'echo "whsec_$(openssl rand -base64 32)"'


class ReceiverError(UserError):
    """An unusable address or secret; the text shows neither."""


@dataclass
class Receiver:
    """A receiver of messages; with a `key`, messages are signed.

    `patience` is the total of seconds that deliveries may wait for the receiver.
    """

    url: SplitResult = field(repr=False)
    key: bytes | None = field(default=None, repr=False)
    patience: float = PATIENCE_SECONDS

    @classmethod
    def parse(cls, url: str, secret: str | None) -> Receiver:
        """Parse an address and a secret of Standard Webhooks. Raises ReceiverError."""
        return cls(_address(url), None if secret is None else _key(secret))

    @property
    def is_encrypted(self) -> bool:
        return self.url.scheme == "https"

    @property
    def host(self) -> str:
        return self.url.hostname or ""

    @property
    def target(self) -> str:
        return (self.url.path or "/") + (f"?{self.url.query}" if self.url.query else "")

    def __str__(self) -> str:
        """Return scheme and host alone."""
        return f"{self.url.scheme}://{self.url.netloc}"


def _address(url: str) -> SplitResult:
    expected = "expected an address as https://host/path"
    if re.fullmatch(r"[!-~]+", url) is None:
        raise ReceiverError(f"found characters that no address has, {expected}")
    try:
        parts = urlsplit(url)
        has_host, _ = bool(parts.hostname), parts.port
    except ValueError as error:
        raise ReceiverError(f"found a wrong address ({type(error).__name__}), {expected}") from None
    if parts.scheme not in ("http", "https") or not has_host:
        raise ReceiverError(f"found an address that does not begin with http:// or https:// and a host, {expected}")
    if "@" in parts.netloc:
        raise ReceiverError(
            "found a user or a password in the address, expected none: the receiver knows its messages by their "
            f"signature, see {SECRET_VARIABLE}"
        )
    return parts


def _key(secret: str) -> bytes:
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) not in KEY_BYTES:
        raise ReceiverError(
            f"{SECRET_VARIABLE}: found no secret of a webhook, expected {SECRET_PREFIX} and {KEY_BYTES.start} to "
            f"{KEY_BYTES.stop - 1} bytes in base64; {HOW_TO_MAKE_ONE} makes one"
        )
    return key


RETRIED_STATUSES = (408, 425, 429)  # and all from 500 on: a retry may succeed


Dial = Callable[[str, int, float], socket.socket]
"""Opens a connection to a host's port, within so many seconds."""


@dataclass(frozen=True)
class WebhookMessage:
    """Something that happened; `data` has no text of prompts or outputs."""

    kind: str  # run.ended or job.ended
    data: Mapping[str, Any]
    moment: float = field(default_factory=time.time)  # seconds since the epoch

    @property
    def id(self) -> str:
        """Return an id that stays the same when the message is repeated."""
        identity = json.dumps([self.kind, self.data], sort_keys=True)
        return f"msg_{hashlib.sha256(identity.encode()).hexdigest()[:32]}"

    def body(self) -> bytes:
        moment = datetime.fromtimestamp(self.moment, UTC).isoformat(timespec="milliseconds")
        return json.dumps({"type": self.kind, "timestamp": moment, "data": self.data}).encode()

    def headers(self, body: bytes, key: bytes | None) -> dict[str, str]:
        """Return the HTTP headers of a delivery attempt that is made now."""
        timestamp = str(int(time.time()))
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "swiftbatch",
            "webhook-id": self.id,
            "webhook-timestamp": timestamp,
        }
        if key is not None:
            signed = b".".join([self.id.encode(), timestamp.encode(), body])
            signature = base64.b64encode(hmac.digest(key, signed, "sha256")).decode()
            headers["webhook-signature"] = f"v1,{signature}"
        return headers


class DialledConnection(http.client.HTTPConnection):
    """A connection opened by `dial`, which checks the address."""

    dial: Dial | None = None

    def connect(self) -> None:
        if self.dial is None:
            super().connect()
        else:
            self.sock = self.dial(self.host, self.port, self.timeout or 0)


class DialledEncryptedConnection(http.client.HTTPSConnection, DialledConnection):
    """A `DialledConnection` with TLS; `HTTPSConnection.connect` calls its `connect` first."""


class PostError(Exception):
    """A message that the receiver did not accept; the text omits the address."""


class PostRefusedError(PostError):
    """The receiver's final refusal of a message; retries are useless."""


def post(receiver: Receiver, message: WebhookMessage, seconds: float, dial: Dial | None = None) -> None:
    """Deliver a message within `seconds`. Raises PostError.

    `dial` opens the connection if some addresses are forbidden.
    """
    kind = DialledEncryptedConnection if receiver.is_encrypted else DialledConnection
    connection = kind(receiver.host, receiver.url.port, timeout=seconds)
    connection.dial = dial
    over = threading.Event()
    timer = threading.Timer(seconds, _cut, (connection, over))  # socket timeouts restart with every byte
    timer.daemon = True
    timer.start()
    try:
        body = message.body()
        connection.request("POST", receiver.target, body, message.headers(body, receiver.key))
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        raise PostError(_silence(seconds) if over.is_set() else _reason(error, seconds)) from None
    finally:
        timer.cancel()
        connection.close()
    if over.is_set():  # a truncated head would pass as complete
        raise PostError(_silence(seconds))
    _check(status)


def _cut(connection: http.client.HTTPConnection, over: threading.Event) -> None:
    over.set()
    if connection.sock is not None:
        with contextlib.suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)


def _check(status: int) -> None:
    if 200 <= status < 300:
        return
    if status in RETRIED_STATUSES or status >= 500:
        raise PostError(f"it answered {status}")
    if 300 <= status < 400:
        raise PostRefusedError(f"it answered {status}: redirects are not followed, give the address that it leads to")
    raise PostRefusedError(f"it answered {status}")


def _reason(error: Exception, seconds: float) -> str:
    if isinstance(error, TimeoutError):
        return _silence(seconds)
    if isinstance(error, ssl.SSLCertVerificationError):
        problem = error.verify_message
        return (
            f"its certificate was not accepted ({problem}); the variable SSL_CERT_FILE names a file of those to trust"
        )
    if isinstance(error, ssl.SSLError):
        return f"no TLS there ({error.reason})"
    if isinstance(error, OSError):
        return error.strerror or str(error) or type(error).__name__
    return f"no HTTP ({type(error).__name__})"


def _silence(seconds: float) -> str:
    return f"no answer within {seconds:.1f} s"


# Posts the end of a run, and of jobs if asked, from display events.


TRY_SECONDS = 5.0
MESSAGE_SECONDS = 60.0  # seconds of attempts per message during a run
MAX_WAITING_MESSAGES = 1000  # further messages are dropped
SLACK_SECONDS = 0.3  # for the last attempt to report its error
LEAST_SECONDS = 1.0  # for a last message after the patience is used up
RETRY_BACKOFF = Backoff(first=0.5, longest=10.0).at_random
INTERRUPTED_SECONDS = 5.0  # for the last message after an interruption
STOPPED = 2  # exit code of a command that can't go on

STATES: dict[type[Event], str] = {JobFinished: "finished", JobGivenUp: "failed", JobCancelled: "cancelled"}


class WebhookSender:
    """Delivers each queued message at most once; `failure` explains the first message that was not delivered."""

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
        with self._has_news:
            if len(self._waiting) >= MAX_WAITING_MESSAGES:
                self._lose(f"more than {MAX_WAITING_MESSAGES:,} messages wait")
                return
            self._waiting.append(message)
            self._has_news.notify()

    def finish(self, message: WebhookMessage, seconds: float) -> None:
        """Deliver a last message first, then the pending ones.

        Time spent on failed deliveries reduces the receiver's patience.
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
                wait=RETRY_BACKOFF,
                sleep=self._sleep,
                retry=retry_if_exception(lambda error: not isinstance(error, PostRefusedError)),
                reraise=True,
            )
            try:
                tries(self._try, message)
            except PostError as error:
                self._lose(str(error))
            except Exception as error:  # unforeseen errors must be reported, too
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
        if self._is_ending.is_set():
            return message is not self._last or time.monotonic() >= self._end_by
        return (state.seconds_since_start or 0.0) >= MESSAGE_SECONDS

    def _sleep(self, seconds: float) -> None:
        """Wait `seconds`, but only until `finish` is called, and after that no longer than until its end is due."""
        if self._is_ending.is_set():
            time.sleep(min(seconds, max(0.0, self._end_by - time.monotonic())))
        else:
            self._is_ending.wait(seconds)

    def _lose(self, reason: str) -> None:
        self.failure = self.failure or reason


class PostingDisplay:
    """Passes everything to another display, and posts important events."""

    def __init__(self, display: Display, receiver: Receiver, with_jobs: bool) -> None:
        self._display = display
        self._receiver = receiver
        self._with_jobs = with_jobs
        self._sender = WebhookSender(receiver)
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
        """Post that the run had to stop."""
        newest = self._newest
        jobs, num_tokens = ({}, 0) if newest is None else (newest.jobs, newest.num_generated_tokens)
        self._post_end("interrupted", jobs, num_tokens, None, STOPPED)
        self._tell_failure()

    def _post_end(self, state: str, jobs: dict[str, int], num_tokens: int, limit: str | None, exit_code: int) -> None:
        if not self._run:  # it was refused before it began
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
    """Yield a display that also posts messages."""
    posting_display = PostingDisplay(display, receiver, with_jobs)
    try:
        yield posting_display
    except Exception:
        posting_display.post_error()
        raise
