from __future__ import annotations

import pytest

from tests.k8s.chart import OVERLAYS
from tests.k8s.kubernetes_parts import Object, render


@pytest.fixture(params=OVERLAYS)
def objects(request: pytest.FixtureRequest) -> list[Object]:
    return render(request.param)
