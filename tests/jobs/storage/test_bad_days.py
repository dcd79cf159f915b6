"""A `Store` on a bad day of an S3 server loses nothing, has bounded patience and tells it in one clear line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from io import BytesIO
from tempfile import TemporaryFile
from typing import BinaryIO

import pytest
from tenacity import wait_random_exponential

from swiftbatch.jobs.storage import object_store
from swiftbatch.jobs.storage.retries import Retries
from swiftbatch.jobs.storage.store import Store, StoreError
from tests import ROOT
from tests.jobs.storage.fault_proxy import FaultProxy

pytestmark = pytest.mark.long


def counted(seconds: float) -> tuple[Retries, list[None]]:
    """Retries, and one entry for each that was made."""
    made: list[None] = []
    return Retries(seconds, lambda: made.append(None)), made


def test_with_503s_and_resets_nothing_is_lost_and_every_retry_is_counted(
    s3_store: Store, s3_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "swiftbatch.jobs.storage.retries.STORE_BACKOFF", wait_random_exponential(multiplier=0.01, max=0.1)
    )
    retries, made = counted(120)
    store = Store(s3_store.uri, retries)
    s3_proxy.chances = {"unavailable": 0.05, "refused": 0.03, "lost": 0.03, "cut": 0.03}
    big = os.urandom(25_000_000)
    store.write("big", big)
    for number in range(30):
        assert store.write_new(f"results/{number}", b"%d" % number)
        assert not store.write_new(f"results/{number}", b"another")
    assert len(store.list("results")) == 30
    assert [store.read(f"results/{number}") for number in range(30)] == [b"%d" % number for number in range(30)]
    assert store.read("absent") is None
    target = BytesIO()
    assert store.copy_to("big", target)
    assert target.getvalue() == big
    store.delete("results/7")
    assert not store.exists("results/7")
    store.delete_folder("results")
    assert s3_store.list("results") == []
    assert {"unavailable", "refused", "lost", "cut"} <= set(s3_proxy.num_faults)
    assert len(made) >= s3_proxy.num_faults["unavailable"] > 0


@pytest.mark.parametrize("kind", [BytesIO, TemporaryFile])
def test_a_file_is_sent_from_where_it_stood_at_the_first_try(
    s3_store: Store, s3_proxy: FaultProxy, kind: Callable[[], BinaryIO]
) -> None:
    with kind() as source:
        source.write(b"head" + b"x" * 100_000)
        source.seek(4)
        s3_proxy.fail_at(0, "unavailable")
        Store(s3_store.uri).write_from("file", source)
    assert s3_store.read("file") == b"x" * 100_000


def test_a_store_that_is_dark_for_a_while_is_waited_for(
    s3_store: Store, s3_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "ANSWER_SECONDS", 1.0)
    retries, made = counted(300)
    store = Store(s3_store.uri, retries)
    store.write("before", b"x")
    s3_proxy.go_dark(3.0)
    store.write("meanwhile", b"y")
    assert s3_store.list("") == ["before", "meanwhile"]
    assert made


def test_a_store_that_stays_dark_is_one_clear_line_after_the_bound(
    s3_store: Store, s3_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "ANSWER_SECONDS", 1.0)
    retries, made = counted(3)
    store = Store(s3_store.uri, retries)
    with s3_proxy.dark(), pytest.raises(StoreError) as caught:
        store.write("file", b"x")
    line = str(caught.value)
    assert line.startswith(f"cannot write 'file' in {s3_store.shown_uri}: ")
    assert line.endswith(", tried for 3 s; check the bucket, the endpoint and the credentials, or use another folder")
    assert "\n" not in line
    assert made
    assert s3_store.list("") == []


def test_a_refusal_is_not_tried_again(s3_store: Store, s3_proxy: FaultProxy) -> None:
    retries, made = counted(10)
    store = Store(s3_store.uri, retries)
    s3_proxy.chances = {"denied": 1.0}
    calls = (store.read, store.exists, store.list, store.delete, lambda path: store.write(path, b"x"))
    for call in calls:
        with pytest.raises(StoreError, match=r": 403 Forbidden(: AccessDenied: As the test wants it\.)?; check"):
            call("file")
    assert not made


def test_a_bucket_that_is_not_there_is_named_at_once(s3_store: Store) -> None:
    retries, made = counted(10)
    store = Store("s3://no-such-bucket/run", retries)
    calls = (store.read, store.exists, store.list, store.delete, lambda path: store.write(path, b"x"))
    for call in calls:
        expected = r"'a' in s3://no-such-bucket/run: [A-Z]+ http://.*: 404 Not Found: NoSuchBucket: "
        with pytest.raises(StoreError, match=expected):
            call("a")
    assert not made


def test_a_command_that_only_reads_still_gets_over_one_503(s3_store: Store, s3_proxy: FaultProxy) -> None:
    s3_store.write("file", b"x")
    s3_proxy.fail_at(0, "unavailable")
    assert Store(s3_store.uri).read("file") == b"x"
    assert s3_proxy.num_faults.total() == 1


def test_a_process_whose_store_is_dark_comes_to_its_end(s3_store: Store, s3_proxy: FaultProxy) -> None:
    program = (
        "import sys, threading, time\n"
        "from swiftbatch.jobs.storage import object_store; object_store.ANSWER_SECONDS = 1.0\n"
        "from swiftbatch.jobs.storage.retries import Retries; from swiftbatch.jobs.storage.store import Store\n"
        "store = Store(sys.argv[1], Retries(1000))\n"
        "write = lambda: store.write('file', bytes(25_000_000))\n"
        "threading.Thread(target=write, daemon=True).start()\n"
        "time.sleep(1.5)"
    )
    with s3_proxy.dark():
        done = subprocess.run([sys.executable, "-c", program, s3_store.uri], cwd=ROOT, timeout=300, check=False)
    assert done.returncode == 0
