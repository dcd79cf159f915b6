"""`Retries` try again only what may pass, with growing pauses, and keep their bound."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from swiftbatch.jobs.storage.local_folder import LocalFolder
from swiftbatch.jobs.storage.retries import NO_RETRIES, Retries, is_transient
from swiftbatch.jobs.storage.store import Store, StoreError
from tests.simulated_clock import SimulatedClock


def failing(num_times: int, error: Exception) -> tuple[Callable[[], str], list[float]]:
    """A call that fails so often, and the times at which it was made."""
    calls: list[float] = []

    def call() -> str:
        calls.append(time.monotonic())  # which may be a simulated one
        if len(calls) <= num_times:
            raise error
        return "done"

    return call, calls


def test_a_call_that_fails_for_a_while_succeeds_and_every_retry_is_counted() -> None:
    call, calls = failing(3, OSError(errno.EIO, "Input/output error"))
    retries: list[None] = []
    assert Retries(30, lambda: retries.append(None)).call(call) == "done"
    assert len(calls) == 4
    assert len(retries) == 3


def test_pauses_grow_and_the_bound_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimulatedClock()
    clock.rule(monkeypatch)
    monkeypatch.setattr(random, "uniform", lambda least, most: most)
    call, calls = failing(1000, OSError("the network is away"))
    with pytest.raises(OSError, match="away"):
        Retries(30).call(call)
    assert clock.slept == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 7.4])  # the last try is at the bound
    assert calls[-1] - calls[0] == pytest.approx(30)


def test_pauses_are_random_so_that_workers_do_not_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = [SimulatedClock(), SimulatedClock()]
    for clock in clocks:
        clock.rule(monkeypatch)
        with pytest.raises(OSError, match="away"):
            Retries(30).call(failing(1000, OSError("the network is away"))[0])
        assert all(0.2 <= pause <= 10 for pause in clock.slept[:-1])
        assert sum(clock.slept) == pytest.approx(30)
    assert clocks[0].slept != clocks[1].slept


def test_without_seconds_nothing_is_tried_again() -> None:
    call, calls = failing(1, OSError(errno.EIO, "Input/output error"))
    with pytest.raises(OSError, match="Input/output"):
        NO_RETRIES.call(call)
    assert len(calls) == 1


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(errno.EACCES, "Permission denied"),
        FileNotFoundError(errno.ENOENT, "No such file"),
        OSError(errno.EROFS, "Read-only file system"),
        ValueError("damaged"),
    ],
)
def test_what_no_second_try_can_change_is_not_tried_again(error: Exception) -> None:
    assert not is_transient(error)
    call, calls = failing(1, error)
    with pytest.raises(type(error)):
        Retries(30).call(call)
    assert len(calls) == 1


def test_a_store_that_stumbles_loses_nothing(tmp_path: Path) -> None:
    class Stumbling(LocalFolder):
        """Every second call fails, as on a network disk; every other failure comes after the work was done."""

        num_calls = 0

        def write_new_from(self, path: str, source: BinaryIO) -> bool:
            Stumbling.num_calls += 1
            if Stumbling.num_calls % 4 == 1:
                raise OSError(errno.ESTALE, "Stale file handle")
            is_written = super().write_new_from(path, source)
            if Stumbling.num_calls % 4 == 3:
                raise OSError(errno.EIO, "Input/output error")
            return is_written

    retries: list[None] = []
    store = Store(str(tmp_path), Retries(30, lambda: retries.append(None)))
    store._folder = Stumbling(str(tmp_path))
    assert [store.write_new(name, name.encode()) for name in "abcd"] == [True] * 4
    assert [store.write_new(name, b"another's") for name in "abcd"] == [False] * 4
    assert [store.read(name) for name in "abcd"] == [b"a", b"b", b"c", b"d"]
    assert retries


def test_an_error_says_for_how_long_it_was_tried(tmp_path: Path) -> None:
    class Failing(LocalFolder):
        def read(self, path: str) -> bytes | None:
            raise OSError(errno.ESTALE if path == "stale" else errno.EACCES, "It failed")

    store = Store(str(tmp_path), Retries(0.3))
    store._folder = Failing(str(tmp_path))
    with pytest.raises(StoreError, match=r"cannot read 'stale' in .*: It failed, tried for 0\.3 s; check that"):
        store.read("stale")
    with pytest.raises(StoreError, match=r"cannot read 'denied' in .*: It failed; check that"):
        store.read("denied")
