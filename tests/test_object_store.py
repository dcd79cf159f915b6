"""What a `Store` promises on an S3 server that fails: whole files, nothing lost, bounded patience, one clear line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO
from uuid import uuid4

import pytest
from fault_proxy import Fault, FaultProxy
from pyarrow import fs
from s3_server import S3Server
from tenacity import wait_random_exponential

from jobs import object_stores
from jobs.object_stores import CHECKSUMS, open_place
from jobs.retries import NO_RETRIES, Retries
from jobs.store import Store, StoreError

ROOT = Path(__file__).parent.parent


@pytest.fixture
def direct(s3_uri: str) -> Store:
    """The folder, past the proxy."""
    return Store(s3_uri)


@pytest.fixture
def proxy(direct: Store, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """Stands between the server and every store that is opened from now on."""
    proxy = FaultProxy(s3_server.address, seed=1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    yield proxy
    proxy.close()


def counted(seconds: float) -> tuple[Retries, list[None]]:
    """Retries, and one entry for each that was made."""
    made: list[None] = []
    return Retries(seconds, lambda: made.append(None)), made


def at_request(number: int, fault: Fault) -> Callable[[str, str], Fault | None]:
    """A fault for the request of this number, from 0 on."""
    numbers = iter(range(1_000_000))
    return lambda method, path: fault if next(numbers) == number else None


class TestWholeFiles:
    def test_a_small_file_is_one_request_and_a_big_one_goes_up_in_parts(self, direct: Store, proxy: FaultProxy) -> None:
        store = Store(direct.uri)
        store.write("small", b"x" * 100_000)
        assert [request.split()[0] for request in proxy.requests] == ["PUT"]
        data = os.urandom(60_000_000)
        store.write("big", memoryview(data))
        assert sum("partNumber=" in request for request in proxy.requests) == 6
        assert direct.read("big") == data

    @pytest.mark.parametrize("fault", ["unavailable", "lost"])
    @pytest.mark.parametrize("size", [1000, 6_000_000, 25_000_000])
    def test_a_write_that_fails_at_any_request_leaves_the_old_file_or_the_new_one(
        self, direct: Store, proxy: FaultProxy, size: int, fault: Fault
    ) -> None:
        store = Store(direct.uri, NO_RETRIES)
        new = os.urandom(size)
        for number in range(10):
            direct.write("file", b"old")
            proxy.choose = at_request(number, fault)
            num_faults = proxy.num_faults.total()
            try:
                store.write("file", new)
                expected = {new}
            except StoreError:
                expected = {b"old", new} if fault == "lost" else {b"old"}
            assert direct.read("file") in expected
            if proxy.num_faults.total() == num_faults:
                return
        raise AssertionError("more requests than expected")

    def test_an_interrupt_in_the_middle_of_a_write_publishes_no_part_of_it(
        self, direct: Store, proxy: FaultProxy
    ) -> None:
        def interrupt(method: str, path: str) -> None:
            if "partNumber=2&" in path:
                os.kill(os.getpid(), signal.SIGINT)

        new = os.urandom(65_000_000)
        store = Store(direct.uri)
        direct.write("file", b"old")
        proxy.choose = interrupt
        with pytest.raises(KeyboardInterrupt):
            store.write("file", new)
        assert direct.read("file") in {b"old", new}

    def test_a_writer_killed_in_the_middle_leaves_the_old_file(self, direct: Store, proxy: FaultProxy) -> None:
        program = "import sys; from jobs.store import Store; Store(sys.argv[1]).write('file', bytes(65_000_000))"
        direct.write("file", b"old")
        writer: list[int] = []

        def kill(method: str, path: str) -> None:
            if "partNumber=2&" in path:
                os.kill(writer[0], signal.SIGKILL)

        proxy.choose = kill
        process = subprocess.Popen([sys.executable, "-c", program, direct.uri], cwd=ROOT)
        writer.append(process.pid)
        assert process.wait(60) == -signal.SIGKILL
        assert direct.read("file") == b"old"

    def test_a_file_that_is_replaced_while_it_is_read_is_read_whole(self, direct: Store, proxy: FaultProxy) -> None:
        new = b"new, and longer than the old one"

        def replace(method: str, path: str) -> None:
            if method == "GET":
                proxy.choose = lambda method, path: None
                direct.write("file", new)

        store = Store(direct.uri)
        direct.write("file", b"old")
        proxy.choose = replace
        assert store.read("file") == new
        direct.write("file", b"old")
        proxy.choose = replace
        with pytest.raises(StoreError, match="it was replaced while it was read; try again"):
            store.copy_to("file", BytesIO())

    def test_a_big_file_is_not_held_in_memory_twice_on_a_slow_line(self, direct: Store, proxy: FaultProxy) -> None:
        program = (
            "import re, sys\n"
            "from pathlib import Path\n"
            "from jobs.store import Store\n"
            "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1]) * 1024\n"
            "store, data = Store(sys.argv[1]), memoryview(b'x' * 120_000_000)\n"
            "store.write('warm', data[:1000])\n"
            "before = peak()\n"
            "store.write('file', data)\n"
            "print(peak() - before)"
        )
        proxy.choose = lambda method, path: time.sleep(0.2)
        command = [sys.executable, "-c", program, direct.uri]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
        assert int(done.stdout) < 60_000_000


class TestBadDays:
    def test_with_503s_and_resets_nothing_is_lost_and_every_retry_is_counted(
        self, direct: Store, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("jobs.retries.PAUSE", wait_random_exponential(multiplier=0.01, max=0.1))
        retries, made = counted(120)
        store = Store(direct.uri, retries)
        proxy.chances = {"unavailable": 0.05, "refused": 0.03, "lost": 0.03, "cut": 0.03}
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
        assert direct.list("results") == []
        assert {"unavailable", "refused", "lost", "cut"} <= set(proxy.num_faults)
        assert len(made) >= proxy.num_faults["unavailable"] > 0

    @pytest.mark.parametrize("kind", [BytesIO, TemporaryFile])
    def test_a_file_is_sent_from_where_it_stood_at_the_first_try(
        self, direct: Store, proxy: FaultProxy, kind: Callable[[], BinaryIO]
    ) -> None:
        with kind() as source:
            source.write(b"head" + b"x" * 100_000)
            source.seek(4)
            proxy.choose = at_request(0, "unavailable")
            Store(direct.uri).write_from("file", source)
        assert direct.read("file") == b"x" * 100_000

    def test_a_store_that_is_dark_for_a_while_is_waited_for(
        self, direct: Store, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(object_stores, "ANSWER_SECONDS", 1.0)
        retries, made = counted(30)
        store = Store(direct.uri, retries)
        store.write("before", b"x")
        proxy.go_dark(3.0)
        store.write("meanwhile", b"y")
        assert direct.list("") == ["before", "meanwhile"]
        assert made

    def test_a_store_that_stays_dark_is_one_clear_line_after_the_bound(
        self, direct: Store, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(object_stores, "ANSWER_SECONDS", 1.0)
        retries, made = counted(3)
        store = Store(direct.uri, retries)
        start = time.monotonic()
        with proxy.dark(), pytest.raises(StoreError) as caught:
            store.write("file", b"x")
        assert 3 <= time.monotonic() - start < 8
        line = str(caught.value)
        assert line.startswith(f"cannot write 'file' in {direct.shown_uri}: ")
        assert line.endswith(
            ", tried for 3 s; check the bucket, the endpoint and the credentials, or use another folder"
        )
        assert "\n" not in line
        assert made
        assert direct.list("") == []

    def test_a_refusal_is_not_tried_again(self, direct: Store, proxy: FaultProxy) -> None:
        retries, made = counted(10)
        store = Store(direct.uri, retries)
        proxy.chances = {"denied": 1.0}
        calls = (store.read, store.exists, store.list, store.delete, lambda path: store.write(path, b"x"))
        for call in calls:
            with pytest.raises(StoreError, match="ACCESS_DENIED"):
                call("file")
        assert not made

    def test_a_bucket_that_is_not_there_is_named_at_once(self, direct: Store) -> None:
        retries, made = counted(10)
        with pytest.raises(StoreError, match=r"cannot write 'a' in s3://no-such-bucket/run: .*NO_SUCH_BUCKET"):
            Store("s3://no-such-bucket/run", retries).write("a", b"x")
        assert not made

    def test_a_command_that_only_reads_still_gets_over_one_503(self, direct: Store, proxy: FaultProxy) -> None:
        direct.write("file", b"x")
        proxy.choose = at_request(1, "unavailable")
        assert Store(direct.uri).read("file") == b"x"
        assert proxy.num_faults.total() == 1

    def test_a_process_whose_store_is_dark_comes_to_its_end(self, direct: Store, proxy: FaultProxy) -> None:
        program = (
            "import sys, threading, time\n"
            "from jobs import object_stores; object_stores.ANSWER_SECONDS = 1.0\n"
            "from jobs.retries import Retries; from jobs.store import Store\n"
            "store = Store(sys.argv[1], Retries(1000))\n"
            "write = lambda: store.write('file', bytes(25_000_000))\n"
            "threading.Thread(target=write, daemon=True).start()\n"
            "time.sleep(1.5)"
        )
        with proxy.dark():
            done = subprocess.run([sys.executable, "-c", program, direct.uri], cwd=ROOT, timeout=30, check=False)
        assert done.returncode == 0


class TestWhereItIs:
    def test_a_body_comes_with_its_length_as_other_servers_than_amazons_need_it(
        self, direct: Store, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv(CHECKSUMS, raising=False)
        store = Store(direct.uri)
        store.write("small", b"x")
        store.write("big", bytes(12_000_000))
        assert proxy.num_without_length == 0

    def test_the_endpoint_may_stand_in_the_uri(
        self, direct: Store, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("AWS_ENDPOINT_URL")
        endpoint = proxy.url.removeprefix("http://")
        store = Store(f"{direct.uri}?scheme=http&endpoint_override={endpoint}")
        store.write("file", b"x")
        assert direct.read("file") == b"x"
        assert store.shown_uri == direct.shown_uri

    @pytest.mark.parametrize("setting", ["tls_verify_certificates=false", "tls_ca_dir_path=/etc/ssl"])
    def test_settings_of_tls_in_the_uri_stay(self, s3_uri: str, setting: str) -> None:
        uri = f"{s3_uri}?{setting}"
        place = open_place(uri)
        assert place.filesystem.equals(fs.FileSystem.from_uri(uri)[0])
        assert not place.filesystem.equals(fs.FileSystem.from_uri(s3_uri)[0])

    def test_runs_side_by_side_in_one_bucket_do_not_see_each_other(self, s3_uri: str) -> None:
        name = uuid4().hex
        one, ten = Store(f"{s3_uri}/{name}-1"), Store(f"{s3_uri}/{name}-10/")
        one.write("folder/a", b"x")
        ten.write("folder/b", b"y")
        one.delete_folder("folder")
        assert one.list("folder") == []
        assert ten.list("folder") == ["b"]
