"""The receiver of messages: an address without credentials to post to, and a secret key to sign with.

The path and the query of an address may be all that keeps strangers out, so none of them is ever shown.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass, field
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
