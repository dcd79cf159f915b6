"""The rules of a device for all tests here: its infinities are numpy's warnings, its sums are of whole numbers."""

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
