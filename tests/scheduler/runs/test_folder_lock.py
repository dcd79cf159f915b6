from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from swiftbatch.jobs.run.run_records import pretty, read_model
from swiftbatch.jobs.storage.store import Store
from swiftbatch.scheduler.runs.folder_lock import FolderHeldError, FolderLease, Holder, file_of, hold
from tests.scheduler.commands.nightly_parts import held_elsewhere

FILE = file_of("nightly")
DEADLINE_SECONDS = 120

FAR = b'{"holder_id": "1", "host": "h", "pid": 1, "started": 1e300, "updated": 1}'


def test_one_that_was_killed_is_in_nobody_s_way(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "runs"))
    with held_elsewhere(tmp_path / "runs") as other:
        other.kill()
        other.wait()
        with hold(store, False, "nightly"):
            pass
    gone = Holder(holder_id="1", host="elsewhere", pid=1, started=0, updated=time.time() - 60)
    store.write(FILE, pretty(gone))
    with hold(store, False, "nightly"):
        assert read_model(store, FILE, Holder).pid == os.getpid()
    assert store.read(FILE) is None


def test_one_that_was_overtaken_while_it_slept_stops_before_its_next_file(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "runs"))
    first = FolderLease(store, "nightly")
    first.check()
    second = FolderLease(store, "nightly")
    with pytest.raises(FolderHeldError, match="has taken over; this one stops"):
        first.check()
    first.stop()
    assert store.read(FILE) is not None, "the hold is the other's"
    second.check()
    second.stop()
    assert store.read(FILE) is None


def test_the_hold_is_renewed_and_lets_go_of_what_another_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swiftbatch.scheduler.runs.folder_lock.BEAT_SECONDS_OBJECT_STORE", 0.05)
    store = Store(str(tmp_path / "runs"))
    held = FolderLease(store, "nightly")
    first = read_model(store, FILE, Holder)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while read_model(store, FILE, Holder) == first and time.monotonic() < deadline:
        time.sleep(0.02)
    assert read_model(store, FILE, Holder) != first
    other = Holder(holder_id="other", host="elsewhere", pid=1, started=0, updated=0)
    while read_model(store, FILE, Holder) != other and time.monotonic() < deadline:
        store.write(FILE, pretty(other))  # a heartbeat that had just checked writes once more
        time.sleep(0.2)
    assert read_model(store, FILE, Holder) == other
    held.stop()
    assert read_model(store, FILE, Holder) == other


@pytest.mark.parametrize("data", [b"", b"{torn", b"[]", b"{}", FAR])
def test_a_damaged_sign_of_life_holds_nobody_up(tmp_path: Path, data: bytes) -> None:
    store = Store(str(tmp_path / "runs"))
    store.write(FILE, data)
    with hold(store, False, "nightly") as held:
        store.write(FILE, data)
        held.check()
