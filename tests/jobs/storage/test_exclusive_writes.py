"""Of several writers of a new object one wins, and no store is used that could not promise that."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO

import pytest

from swiftbatch.jobs.storage import object_store
from swiftbatch.jobs.storage.retries import NO_RETRIES, Retries
from swiftbatch.jobs.storage.store import Store, StoreError
from tests.jobs.storage.fault_proxy import FaultProxy

pytestmark = pytest.mark.long

NUM_ROUNDS = 50
NUM_WRITERS = 2


def race(uri: str) -> None:
    """Have writers write the same new file at once, round after round; each has a store of its own."""
    stores = [Store(uri) for _ in range(NUM_WRITERS)]
    barrier = threading.Barrier(NUM_WRITERS, timeout=60)

    def write(writer: int) -> list[bool]:
        wins = []
        for number in range(NUM_ROUNDS):
            barrier.wait()
            wins.append(stores[writer].write_new(f"{number}", b"%d" % writer))
        return wins

    with ThreadPoolExecutor(NUM_WRITERS) as pool:
        wins = list(pool.map(write, range(NUM_WRITERS)))
    for number, of_round in enumerate(zip(*wins, strict=True)):
        assert sum(of_round) == 1, f"{sum(of_round)} writers won round {number}"
        assert stores[0].read(f"{number}") == b"%d" % of_round.index(True)


def test_of_two_writers_at_once_one_wins_every_time(s3_uri: str) -> None:
    race(s3_uri)


@pytest.mark.parametrize("size", [1000, 12_000_000])
def test_a_write_whose_answer_was_lost_has_won(s3_store: Store, s3_proxy: FaultProxy, size: int) -> None:
    store = Store(s3_store.uri, Retries(10))
    store.write_new("first", b"x")
    for name, before in (("mine", b""), ("other", b"y" * size), ("shorter", b"x" * (size - 1))):
        if before:
            s3_store.write(name, before)
        source = BytesIO(b"head" + b"x" * size)
        source.seek(4)
        s3_proxy.fail_at(0, "lost")
        assert store.write_new_from(name, source) == (not before)
        assert s3_store.read(name) == before or b"x" * size


def test_a_server_that_ignores_conditions_is_refused(s3_store: Store, s3_proxy: FaultProxy) -> None:
    s3_proxy.hidden_headers = {"if-none-match"}
    store = Store(s3_store.uri)
    for _ in range(2):
        with pytest.raises(StoreError, match=r"cannot write 'a' in s3://.*: the server ignores .*; use a store that"):
            store.write_new("a", b"x")
    assert s3_store.list("") == []
    store.write("a", b"x")  # what may be overwritten has no need of it
    assert store.read("a") == b"x"


def test_a_server_that_knows_no_conditions_is_refused_at_once(s3_store: Store, s3_proxy: FaultProxy) -> None:
    s3_proxy.chances = {"unknown": 1.0}
    made: list[None] = []
    with pytest.raises(StoreError, match=r": 501 Not Implemented: NotImplemented: .*; use a store that knows"):
        Store(s3_store.uri, Retries(10, lambda: made.append(None))).write_new("a", b"x")
    assert not made


def test_a_store_looks_once_whether_the_server_knows_conditions(s3_store: Store, s3_proxy: FaultProxy) -> None:
    for store, num_looks in ((Store(s3_store.uri), 2), (Store(s3_store.uri), 1)):
        s3_proxy.requests.clear()
        for number in range(3):
            store.write_new(f"{number}", b"x")
        assert sum(request.endswith(object_store.PROBE) for request in s3_proxy.requests) == num_looks


def test_a_writer_that_met_another_which_did_not_come_through_tries_again(
    s3_store: Store, s3_proxy: FaultProxy
) -> None:
    store = Store(s3_store.uri, Retries(10))
    store.write_new("first", b"x")
    s3_proxy.fail_at(0, "conflict")
    assert store.write_new("a", b"x")
    s3_proxy.fail_at(0, "conflict")
    assert not store.write_new("a", b"y")
    s3_proxy.fail_at(1, "conflict")
    with pytest.raises(StoreError, match="another request was on its way"):
        Store(s3_store.uri, NO_RETRIES).write_new("b", b"x")


def test_what_is_too_long_for_one_request_goes_up_in_parts_after_a_look(
    s3_store: Store, s3_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "MOST_BYTES_NEW", 20_000_000)
    store, data = Store(s3_store.uri), bytes(20_000_001)
    assert store.write_new_from("a", BytesIO(data))
    assert sum("partNumber=" in request for request in s3_proxy.requests) == 2
    assert not store.write_new_from("a", BytesIO(data + b"x"))
    assert s3_store.read("a") == data
