"""The tiny model as files need it: loaded, or as a copy to change. A file imports the fixtures that it uses."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import locate_model


@pytest.fixture(scope="module")
def target(tiny_model: Path) -> TargetModel:
    return TargetModel.load(locate_model(str(tiny_model)), "float32", "cpu")  # bf16 layers this small are not row-exact


@pytest.fixture
def model(tmp_path: Path, tiny_model: Path) -> Path:
    """A changeable copy."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.fixture(autouse=True)
def numbers_as_a_gpu_has_them() -> Iterator[None]:
    """Lets NaN and infinities pass silently, as on a GPU."""
    with np.errstate(all="ignore"):
        yield
