"""A `Store` on a local disk: a file appears whole or not at all, however its writer ended."""

from __future__ import annotations

import errno
import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from swiftbatch.jobs.storage.store import Store, StoreError
from tests import ROOT


def test_temporary_names_are_not_listed_and_none_is_left_by_a_write(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.write("a", b"x")
    assert os.listdir(tmp_path) == ["a"]
    (tmp_path / ".b.1234").write_bytes(b"torn")
    assert store.list("") == ["a"]


def test_a_failed_write_leaves_the_old_file_and_no_temporary(tmp_path: Path) -> None:
    class Failing(BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise OSError(28, "No space left on device")

    store = Store(str(tmp_path))
    store.write("a", b"old")
    with pytest.raises(
        StoreError, match=r"cannot write 'a' in .*: No space left on device; the disk is full: make room"
    ):
        store.write_from("a", Failing())
    assert store.read("a") == b"old"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("when", ["before the file is written", "behind it"])
def test_a_folder_that_another_program_deletes_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """A worker of a killed driver ends a job and drops its checkpoints while the next driver writes one of them."""
    name = "swiftbatch.jobs.storage.local_folder._make_folder" if when.startswith("before") else "os.fsync"
    module, _, function = name.rpartition(".")
    call, deleted = getattr(importlib.import_module(module), function), list[Path]()

    def deleting(argument: Any) -> None:
        call(argument)
        if not deleted:
            deleted.append(tmp_path / "job")
            shutil.rmtree(tmp_path / "job")

    monkeypatch.setattr(name, deleting)
    Store(str(tmp_path)).write("job/claim.json", b"x")
    assert deleted
    assert (tmp_path / "job/claim.json").read_bytes() == b"x"


WRITER = """
import sys
from swiftbatch.jobs.storage.store import Store
store = Store(sys.argv[1])
while True:
    for letter in b"abc":
        store.write("file", bytes([letter]) * 3_000_000)
        print(flush=True)
"""


def test_a_writer_killed_at_any_moment_leaves_a_whole_file(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    for round_number in range(6):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, tmp_path], cwd=ROOT, stdout=subprocess.PIPE)
        writer.stdout.readline()
        time.sleep(0.002 * round_number)
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        data = store.read("file")
        assert len(data) == 3_000_000
        assert len(set(data)) == 1
        assert store.list("") == ["file"]


def test_data_is_on_the_disk_before_its_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def record(name: str, real: Callable[..., None]) -> Callable[..., None]:
        def recorded(*args: Any) -> None:
            calls.append(name)
            real(*args)

        return recorded

    for name in ("fsync", "replace", "link"):
        monkeypatch.setattr(os, name, record(name, getattr(os, name)))
    store = Store(str(tmp_path))
    store.write("a", b"x")
    store.write_new("b", b"x")
    assert calls == ["fsync", "replace", "fsync", "fsync", "link", "fsync"]


def test_of_many_writers_of_a_new_file_one_wins(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    for round_number in range(20):
        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(lambda number: store.write_new(f"{round_number}", bytes([number])), range(8)))  # noqa: B023
        assert won.count(True) == 1
        assert store.read(f"{round_number}") == bytes([won.index(True)])


def test_a_new_file_is_written_where_hard_links_are_not_to_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    store = Store(str(tmp_path))
    assert store.write_new("a", b"first")
    assert not store.write_new("a", b"second")
    assert os.listdir(tmp_path) == ["a"]
    assert store.read("a") == b"first"


FULL_DISK = """
import os, sys, threading
from swiftbatch.jobs.storage.retries import Retries
from swiftbatch.jobs.storage.store import Store, StoreError
store = Store(sys.argv[1])
store.write("first", b"1" * 600_000)
store.write("second", b"old")
try:
    store.write("second", b"2" * 600_000)
except StoreError as error:
    print(error)
print(sorted(os.listdir(sys.argv[1])), store.read("second"))
threading.Timer(1, store.delete, ["first"]).start()
Store(sys.argv[1], Retries(30)).write("second", b"2" * 600_000)
print(os.listdir(sys.argv[1]), len(store.read("second")))
"""


def test_a_full_disk_is_named_leaves_nothing_half_written_and_is_waited_for(tmp_path: Path) -> None:
    mount = 'mount -t tmpfs -o size=1m tmpfs "$0" && exec "$1" -c "$2" "$0"'
    command = ["unshare", "-rm", "sh", "-c", mount]
    if subprocess.run([*command, tmp_path, "true", ""], capture_output=True, check=False).returncode != 0:
        pytest.skip("needs a mount namespace of its own: `unshare -rm` with tmpfs")
    done = subprocess.run([*command, tmp_path, sys.executable, FULL_DISK], cwd=ROOT, capture_output=True, text=True)
    line, after_failure, in_the_end = done.stdout.splitlines()
    assert line == (
        f"cannot write 'second' in {tmp_path}: No space left on device; "
        "the disk is full: make room there, or use another folder"
    )
    assert after_failure == "['first', 'second'] b'old'"
    assert in_the_end == "['second'] 600000"


@pytest.mark.parametrize("is_link", [True, False])
def test_a_folder_s_place_that_is_taken_by_a_file_or_a_link_to_nowhere_is_named_at_once(
    tmp_path: Path, is_link: bool
) -> None:
    place = tmp_path / "taken"
    place.symlink_to("nowhere") if is_link else place.write_bytes(b"")
    store = Store(str(tmp_path))
    for write in (store.write, store.write_new):
        with pytest.raises(StoreError, match="found a file or a link that leads nowhere, expected a folder"):
            write("taken/a", b"x")


def test_a_folder_that_is_a_link_goes_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "a").write_bytes(b"x")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "folder").symlink_to("../kept")
    store = Store(str(tmp_path / "run"))
    store.delete_folder("folder")
    assert store.list("") == []
    assert (tmp_path / "kept" / "a").read_bytes() == b"x"


def test_a_folder_goes_however_many_of_its_files_another_one_deletes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{number:02d}" for number in range(20)]
    store = Store(str(tmp_path))
    for name in names:
        store.write(f"folder/{name}", b"x")
    rmtree = shutil.rmtree

    def too_late(folder: Path) -> None:
        if names:
            (folder / names.pop()).unlink()
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        rmtree(folder)

    monkeypatch.setattr(shutil, "rmtree", too_late)
    store.delete_folder("folder")
    assert store.list("") == []
