from __future__ import annotations

from pathlib import Path

import pytest

from swiftbatch.jobs.run.run import Run
from tests.worker.session.session_parts import make_run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path / "run")
