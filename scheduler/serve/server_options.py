"""The options of `swiftbatch serve`, each default once. Light: the command line shows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swiftbatch.scheduler.serve.batch_queue import MAX_RUNNING

if TYPE_CHECKING:
    from swiftbatch.scheduler.display.webhooks import Receiver


@dataclass(frozen=True)
class ServeOptions:
    """The address of the server, the number of batches that run at a time, and the length of a file that is uploaded.

    Without `api_keys`, the path of a file, who reaches the port may do anything: `is_open` says that this is meant.
    The end of every batch is told to `webhook`; `webhook_hosts` are those that batches may name for theirs.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    max_running: int = MAX_RUNNING
    max_file_bytes: int = 2 * 2**30
    api_keys: str | None = None
    is_open: bool = False
    webhook: Receiver | None = None
    webhook_hosts: str | None = None
