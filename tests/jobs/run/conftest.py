from __future__ import annotations

from pathlib import Path

import pytest

from swiftbatch.jobs.run.run import Run
from tests.jobs.run.run_parts import MANIFEST


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.planned(str(tmp_path / "run"), MANIFEST).made()
