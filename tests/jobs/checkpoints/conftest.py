from __future__ import annotations

from pathlib import Path

import pytest

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.storage.store import Store
from tests.jobs.checkpoints.checkpoint_parts import FINGERPRINT


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path))


@pytest.fixture
def checkpoints(store: Store) -> CheckpointStore:
    return CheckpointStore(store, FINGERPRINT)
