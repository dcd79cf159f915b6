"""A message as Standard Webhooks has it, its receiver, and one try to deliver it, over in seconds whatever that does.

A message says what happened, under an id of its own, and is signed at every try. Answers are not read beyond their
head. The path and the query of an address may be all that keeps strangers out, so none of them is ever shown.
"""

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import SplitResult, urlsplit

from swiftbatch.jobs.errors import UserError

SECRET_VARIABLE = "SWIFTBATCH_WEBHOOK_SECRET"
PREFIX = "whsec_"
KEY_BYTES = range(24, 65)  # of Standard Webhooks
PATIENCE_SECONDS = 30.0
HOW_TO_MAKE_ONE = 'echo "whsec_$(openssl rand -base64 32)"'


class ReceiverError(UserError):
    """An address or a secret that can't be used; the text shows neither."""


@dataclass
class Receiver:
    """A receiver of messages: `key` signs them, None to leave them unsigned.

    `patience` are the seconds that a command may still wait in all for a receiver that takes nothing.
    """

    url: SplitResult = field(repr=False)
    key: bytes | None = field(default=None, repr=False)
    patience: float = PATIENCE_SECONDS

    @classmethod
    def parse(cls, url: str, secret: str | None) -> Receiver:
        """The receiver at an address; `secret` is as Standard Webhooks writes it. Raises ReceiverError."""
        return cls(_address(url), None if secret is None else _key(secret))

    @property
    def is_encrypted(self) -> bool:
        return self.url.scheme == "https"

    @property
    def host(self) -> str:
        return self.url.hostname or ""

    @property
    def target(self) -> str:
        """The target of a request: path and query."""
        return (self.url.path or "/") + (f"?{self.url.query}" if self.url.query else "")

    def __str__(self) -> str:
        """Show scheme and host alone."""
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
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) not in KEY_BYTES:
        raise ReceiverError(
            f"{SECRET_VARIABLE}: found no secret of a webhook, expected {PREFIX} and {KEY_BYTES.start} to "
            f"{KEY_BYTES.stop - 1} bytes in base64; {HOW_TO_MAKE_ONE} makes one"
        )
    return key


AGAIN = (408, 425, 429)  # and all from 500 on: the same message may be taken later


Dial = Callable[[str, int, float], socket.socket]
"""Opens a connection to a host's port, within so many seconds."""


@dataclass(frozen=True)
class WebhookMessage:
    """Something that has happened; `data` says what, without any text of prompts and outputs."""

    kind: str  # run.ended or job.ended
    data: Mapping[str, Any]
    moment: float = field(default_factory=time.time)  # seconds since the epoch

    @property
    def id(self) -> str:
        """The message's id: the same whenever the same is told again, by whichever driver."""
        identity = json.dumps([self.kind, self.data], sort_keys=True)
        return f"msg_{hashlib.sha256(identity.encode()).hexdigest()[:32]}"

    def body(self) -> bytes:
        moment = datetime.fromtimestamp(self.moment, UTC).isoformat(timespec="milliseconds")
        return json.dumps({"type": self.kind, "timestamp": moment, "data": self.data}).encode()

    def headers(self, body: bytes, key: bytes | None) -> dict[str, str]:
        """The headers of a try that is made now; without a key there is no signature."""
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
    """A connection that is opened by somebody who looks at the address."""

    dial: Dial | None = None

    def connect(self) -> None:
        if self.dial is None:
            super().connect()
        else:
            self.sock = self.dial(self.host, self.port, self.timeout or 0)


class DialledEncryptedConnection(http.client.HTTPSConnection, DialledConnection):
    """A `DialledConnection` with the host's certificate: `HTTPSConnection.connect` calls its `connect` first."""


class PostError(Exception):
    """A message that was not taken; the text says why, without the address."""


class PostRefusedError(PostError):
    """A message that would not be taken later either."""


def post(receiver: Receiver, message: WebhookMessage, seconds: float, dial: Dial | None = None) -> None:
    """Deliver a message within `seconds`, but for the time that a slow name server takes. Raises PostError.

    `dial` opens the connection where not every address of the receiver's host will do.
    """
    kind = DialledEncryptedConnection if receiver.is_encrypted else DialledConnection
    connection = kind(receiver.host, receiver.url.port, timeout=seconds)
    connection.dial = dial
    over = threading.Event()
    timer = threading.Timer(seconds, _cut, (connection, over))  # timeouts of sockets begin anew with every byte
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
    if over.is_set():  # a head that is cut off is taken for a whole one
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
    if status in AGAIN or status >= 500:
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
