"""Kernels run in Triton's interpreter, on a CPU."""

from pathlib import Path

import pytest

import tests.worker.interpreter  # noqa: F401
from swiftbatch.worker.model.model_files import ModelFiles, locate_model
from tests.tiny_targets import numbers_as_a_gpu_has_them as numbers_as_a_gpu_has_them


@pytest.fixture(scope="module")
def files(one_layer_model: Path) -> ModelFiles:
    return locate_model(str(one_layer_model))
