from __future__ import annotations

from pathlib import Path

import pytest

from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.training.training_texts import load_target


@pytest.fixture
def tiny_target(tiny_model: Path) -> TargetModel:
    return load_target(locate_model(str(tiny_model)))
