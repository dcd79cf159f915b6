"""A `Store` on an S3 server that is neither Amazon's nor a test's: Ceph's radosgw, where it is installed."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest

from swiftbatch.jobs.storage.store import Store, StoreError
from tests.jobs.storage.ceph_server import IS_INSTALLED, running_ceph_server
from tests.jobs.storage.s3_server import S3Server
from tests.jobs.storage.test_exclusive_writes import race
from tests.jobs.storage.test_store import TestEveryKindOfStore as TestCeph  # noqa: F401

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not IS_INSTALLED, reason="needs radosgw, ceph-mon and ceph-osd of Debian"),
]


@pytest.fixture(scope="module")
def ceph_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with running_ceph_server(tmp_path_factory.mktemp("ceph")) as server:
        yield server


@pytest.fixture
def store(ceph_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Store:
    for name, value in ceph_server.environment().items():
        monkeypatch.setenv(name, value)
    return Store(ceph_server.uri(f"run-{uuid4().hex}"))


def test_of_two_writers_at_once_one_wins_every_time(store: Store) -> None:
    race(store.uri)


def test_a_bucket_that_is_not_there_is_told_from_a_file_that_is_not(store: Store) -> None:
    assert store.read("a") is None
    for call in (Store("s3://no-such-bucket/run").read, Store("s3://no-such-bucket/run").exists):
        with pytest.raises(StoreError, match="404 Not Found: NoSuchBucket"):
            call("a")
