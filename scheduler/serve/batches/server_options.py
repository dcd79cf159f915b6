"""The options of `swiftbatch serve` with defaults, without heavy imports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swiftbatch.scheduler.display.webhooks import Receiver


@dataclass(frozen=True)
class ServeOptions:
    """The options of a server.

    Without `api_keys` everybody at the port has all rights, which `is_open` confirms.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    max_running: int = 1  # batches at a time
    max_file_bytes: int = 2 * 2**30
    api_keys: str | None = None
    is_open: bool = False
    webhook: Receiver | None = None
    webhook_hosts: str | None = None
