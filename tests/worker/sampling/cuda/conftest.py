"""A device's rules for all tests here: silent infinities, integer sums."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import tests.worker.interpreter  # noqa: F401
from swiftbatch.worker.sampling import filters


@pytest.fixture(autouse=True)
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(filters, "running_sum", filters.running_sum_in_any_order)
    with np.errstate(all="ignore"):
        yield
