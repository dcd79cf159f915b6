"""A `Store` on an S3 server: whole files whatever fails, and ways to reach other servers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from html import escape
from io import BytesIO
from pathlib import Path
from uuid import uuid4

import pytest

from swiftbatch.jobs.storage import object_store
from swiftbatch.jobs.storage.object_store import connections
from swiftbatch.jobs.storage.retries import NO_RETRIES
from swiftbatch.jobs.storage.store import Store, StoreError
from tests import ROOT
from tests.jobs.storage.fault_proxy import Fault, FaultProxy
from tests.jobs.storage.s3_server import S3Server

pytestmark = pytest.mark.long


def test_a_small_file_is_one_request_and_a_big_one_goes_up_in_parts(s3_store: Store, s3_proxy: FaultProxy) -> None:
    store = Store(s3_store.uri)
    store.write("small", b"x" * 100_000)
    assert [request.split()[0] for request in s3_proxy.requests] == ["PUT"]
    data = os.urandom(60_000_000)
    store.write("big", memoryview(data))
    assert sum("partNumber=" in request for request in s3_proxy.requests) == 6
    assert s3_store.read("big") == data


@pytest.mark.sample(2)
@pytest.mark.parametrize("fault", ["unavailable", "lost"])
@pytest.mark.parametrize("size", [1000, 6_000_000, 12_000_000])
def test_a_write_that_fails_at_any_request_leaves_the_old_file_or_the_new_one(
    s3_store: Store, s3_proxy: FaultProxy, size: int, fault: Fault
) -> None:
    store = Store(s3_store.uri, NO_RETRIES)
    new = os.urandom(size)
    for number in range(10):
        s3_store.write("file", b"old")
        s3_proxy.fail_at(number, fault)
        num_faults = s3_proxy.num_faults.total()
        try:
            store.write("file", new)
            expected = {new}
        except StoreError:
            expected = {b"old", new} if fault == "lost" else {b"old"}
        assert s3_store.read("file") in expected
        if s3_proxy.num_faults.total() == num_faults:
            return
    raise AssertionError("more requests than expected")


@contextlib.contextmanager
def default_interrupt() -> Iterator[None]:
    """SIGINT raises, also where the tests run in the background of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_in_the_middle_of_a_write_publishes_no_part_of_it(s3_store: Store, s3_proxy: FaultProxy) -> None:
    def interrupt(method: str, path: str) -> None:
        if "partNumber=2&" in path:
            os.kill(os.getpid(), signal.SIGINT)

    new = os.urandom(65_000_000)
    store = Store(s3_store.uri)
    s3_store.write("file", b"old")
    s3_proxy.choose = interrupt
    with default_interrupt(), pytest.raises(KeyboardInterrupt):
        store.write("file", new)
    assert s3_store.read("file") in {b"old", new}


def test_a_writer_killed_in_the_middle_leaves_the_old_file(s3_store: Store, s3_proxy: FaultProxy) -> None:
    program = (
        "import sys; from swiftbatch.jobs.storage.store import Store\n"
        "Store(sys.argv[1]).write('file', bytes(65_000_000))"
    )
    s3_store.write("file", b"old")
    writer: list[int] = []

    def kill(method: str, path: str) -> None:
        if "partNumber=2&" in path:
            os.kill(writer[0], signal.SIGKILL)

    s3_proxy.choose = kill
    process = subprocess.Popen([sys.executable, "-c", program, s3_store.uri], cwd=ROOT)
    writer.append(process.pid)
    assert process.wait(60) == -signal.SIGKILL
    assert s3_store.read("file") == b"old"


def test_a_file_that_is_replaced_while_it_is_read_is_read_whole(s3_store: Store, s3_proxy: FaultProxy) -> None:
    new = b"new, and longer than the old one"

    def replace(method: str, path: str) -> None:
        if method == "GET":
            s3_proxy.choose = lambda method, path: None
            s3_store.write("file", new)

    store = Store(s3_store.uri)
    s3_store.write("file", b"old")
    s3_proxy.choose = replace
    assert store.read("file") == new
    s3_store.write("file", b"old")
    s3_proxy.choose = replace
    with pytest.raises(StoreError, match="it was replaced while it was read; try again"):
        store.copy_to("file", BytesIO())
    s3_store.write("file", b"old")
    s3_proxy.choose = replace
    with pytest.raises(StoreError, match="it was replaced while it was read; try again"):
        list(store.pieces("file", 0, 2) or ())


def test_a_big_file_is_not_held_in_memory_twice_on_a_slow_line(s3_store: Store, s3_proxy: FaultProxy) -> None:
    program = (
        "import re, sys\n"
        "from pathlib import Path\n"
        "from swiftbatch.jobs.storage.store import Store\n"
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1]) * 1024\n"
        "store, data = Store(sys.argv[1]), memoryview(b'x' * 120_000_000)\n"
        "store.write('warm', data[:1000])\n"
        "before = peak()\n"
        "store.write('file', data)\n"
        "print(peak() - before)"
    )
    s3_proxy.choose = lambda method, path: time.sleep(0.2)
    command = [sys.executable, "-c", program, s3_store.uri]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    assert int(done.stdout) < 60_000_000


def test_a_body_comes_with_its_length_as_other_servers_than_amazons_need_it(
    s3_store: Store, s3_proxy: FaultProxy
) -> None:
    store = Store(s3_store.uri)
    store.write("small", b"x")
    store.write("big", bytes(12_000_000))
    assert s3_proxy.num_without_length == 0


def test_the_endpoint_may_stand_in_the_uri(
    s3_store: Store, s3_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    endpoint = s3_proxy.url.removeprefix("http://")
    store = Store(f"{s3_store.uri}?scheme=http&endpoint_override={endpoint}")
    store.write("file", b"x")
    assert s3_store.read("file") == b"x"
    assert store.shown_uri == s3_store.shown_uri


def test_settings_of_tls_may_stand_in_the_uri(s3_uri: str, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("-----BEGIN CERTIFICATE-----\n")
    settings = connections(f"{s3_uri}?tls_verify_certificates=false&tls_ca_file_path={tmp_path}/ca.pem")
    with pytest.raises(OSError, match="builder error"):  # of half a certificate
        settings(1)
    client = connections(f"{s3_uri}?tls_verify_certificates=false")(1).client_options
    assert client["allow_invalid_certificates"] == "true"
    assert connections(f"{s3_uri}?tls_verify_certificates=true")(1).client_options.keys() < client.keys()


def test_keys_may_stand_in_a_profile_of_the_user(
    s3_store: Store, s3_proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "credentials").write_text("[mine]\naws_access_key_id = OFTHEFILE\naws_secret_access_key = secret\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    Store(s3_store.uri, NO_RETRIES).write("file", b"x")
    assert s3_proxy.access_keys == {"OFTHEFILE"}


def test_a_profile_may_ask_a_program_for_its_keys(
    s3_store: Store, s3_proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = '{"Version": 1, "AccessKeyId": "OFTHEPROGRAM", "SecretAccessKey": "secret"}'
    (tmp_path / "keys.json").write_text(keys)
    (tmp_path / "config").write_text(f"[profile asking]\ncredential_process = cat {tmp_path}/keys.json\n")
    program = "import sys; from swiftbatch.jobs.storage.store import Store; Store(sys.argv[1]).write('file', b'x')"
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "asking")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    # files of this kind are read once a process
    subprocess.run([sys.executable, "-c", program, s3_store.uri], cwd=ROOT, timeout=60, check=True)
    assert s3_proxy.access_keys == {"OFTHEPROGRAM"}


@pytest.mark.parametrize("size", [4_900_000, 12_000_000])
def test_a_line_may_be_slow(s3_store: Store, s3_proxy: FaultProxy, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(object_store, "BYTES_MEANWHILE", 2**20)
    s3_proxy.seconds_a_piece = 0.04
    start = time.monotonic()
    Store(s3_store.uri, NO_RETRIES).write("file", bytes(size))
    assert time.monotonic() - start > 2
    assert len(s3_store.read("file") or b"") == size


def test_the_marks_of_empty_folders_are_no_files(s3_store: Store, s3_server: S3Server) -> None:
    for path in ("one/a", "one/inner/b"):
        s3_store.write(f"folder/{path}", b"x")
    bucket, _, prefix = s3_store.uri.removeprefix("s3://").partition("/")
    for folder in ("", "folder/", "folder/one/", "folder/one/inner/"):
        mark = urllib.request.Request(f"{s3_server.url}/{bucket}/{prefix}/{folder}", method="PUT", data=b"")
        urllib.request.urlopen(mark, timeout=60).close()
    assert s3_store.list("") == ["folder"]
    assert s3_store.list("folder/one") == ["a", "inner"]
    assert s3_store.sizes("folder/one") == {"a": 1, "inner": None}
    assert not s3_store.exists("folder/one")
    s3_store.write("folder", b"a file of the same name")
    s3_store.delete_folder("folder/one")
    assert s3_store.sizes("folder/one") == {"inner": None}
    assert s3_store.sizes("folder/one/inner") == {}
    s3_store.delete_folder("folder")
    assert s3_store.read("folder") == b"a file of the same name"


@pytest.mark.parametrize("name", ["a b", "a%41", "ä#[1]~x", "a+b?&=c", "*", "a\\b", '"<>{}|^`'])
def test_a_name_stays_as_it_is(s3_store: Store, s3_server: S3Server, name: str) -> None:
    s3_store.write(name, b"x")
    assert s3_store.list("") == [name]
    assert s3_store.read(name) == b"x"
    bucket, _, prefix = s3_store.uri.removeprefix("s3://").partition("/")
    with urllib.request.urlopen(f"{s3_server.url}/{bucket}?prefix={prefix}", timeout=60) as answer:
        assert f"<Key>{prefix}/{escape(name, quote=False)}</Key>" in answer.read().decode()


def test_a_name_that_no_object_can_have_is_one_line(s3_store: Store) -> None:
    with pytest.raises(StoreError, match=r"cannot write 'a\\tb' in s3://.*: Could not parse path") as caught:
        s3_store.write("a\tb", b"x")
    assert "\n" not in str(caught.value)


def test_runs_side_by_side_in_one_bucket_do_not_see_each_other(s3_uri: str) -> None:
    name = uuid4().hex
    one, ten = Store(f"{s3_uri}/{name}-1"), Store(f"{s3_uri}/{name}-10/")
    one.write("folder/a", b"x")
    ten.write("folder/b", b"y")
    one.delete_folder("folder")
    assert one.list("folder") == []
    assert ten.list("folder") == ["b"]
