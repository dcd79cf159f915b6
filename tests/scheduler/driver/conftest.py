"""One embedded Ray for this folder, because it takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from swiftbatch.scheduler.cluster.ray_cluster import Cluster
from tests.scheduler.driver.driver_parts import counting_cluster


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    with counting_cluster() as cluster:
        yield cluster
