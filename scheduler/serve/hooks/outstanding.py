"""The messages that are still to be delivered: kept until they are, or have been given up.

webhooks/<batch_id>.json    to whom the end of that batch is yet to be told; written before the end itself
"""

from __future__ import annotations

from typing import Literal

from swiftbatch.jobs.frozen import Frozen
from swiftbatch.jobs.run.checked_reading import RunError, pretty, read_model
from swiftbatch.jobs.storage.store import Store
from swiftbatch.scheduler.serve.records import is_batch_id

WEBHOOKS, SUFFIX = "webhooks", ".json"

Target = Literal["server", "batch"]
"""The address of `--webhook` ("server"), or the one that the batch came with ("batch")."""


class Outstanding(Frozen):
    """`webhooks/<batch_id>.json`."""

    version: Literal[1] = 1
    targets: tuple[Target, ...]


class OutstandingMessages:
    """The outstanding messages of all batches. Every method raises StoreError when the storage fails."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def all(self) -> dict[str, tuple[Target, ...]]:
        """The targets of messages that are outstanding, by the ids of their batches."""
        names = [name.removesuffix(SUFFIX) for name in self._store.list(WEBHOOKS)]
        found = {name: self._read(name) for name in names if is_batch_id(name)}
        return {name: outstanding.targets for name, outstanding in found.items() if outstanding is not None}

    def keep(self, batch_id: str, targets: tuple[Target, ...]) -> None:
        """Keep the targets that are yet to be told of a batch's end; an empty tuple if all were."""
        if targets:
            self._store.write(_path(batch_id), pretty(Outstanding(targets=targets)))
        else:
            self._store.delete(_path(batch_id))

    def _read(self, batch_id: str) -> Outstanding | None:
        try:
            return read_model(self._store, _path(batch_id), Outstanding)
        except RunError:
            return None


def _path(batch_id: str) -> str:
    return f"{WEBHOOKS}/{batch_id}{SUFFIX}"
