"""Kernels run in Triton's interpreter, on a CPU."""

from collections.abc import Iterator

import numpy as np
import pytest

import tests.worker.interpreter  # noqa: F401


@pytest.fixture(autouse=True)
def _numbers_as_a_gpu_has_them() -> Iterator[None]:
    """Lets NaN and infinities pass silently, as on a GPU."""
    with np.errstate(all="ignore"):
        yield
