"""Kills while the run's store fails: a disk is full again and again, or S3 has a bad day. Every token is the same."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swiftbatch.scheduler.chaos.chaos_options import ChaosOptions
from swiftbatch.scheduler.chaos.experiment import run_chaos
from tests.jobs.storage.fault_proxy import FaultProxy

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(1800)]

DISK_MIB = 96
FULL_SECONDS, FREE_SECONDS = 5.0, 10.0
NUM_KILLS = 6  # one of each kind
needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("mount") is None, reason="mounts a small disk as root"
)


def run_with(model: Path, run_uri: str, num_jobs: int, show: Callable[[str], None]) -> None:
    """Run chaos; whatever happens to the store, no job is lost, none twice, and all tokens are the same."""
    size = {"num_jobs": num_jobs, "num_tokens": 600, "num_kills": NUM_KILLS, "num_workers": 2, "num_slots": 4}
    options = ChaosOptions(seed=5, model=str(model), checkpoint_tokens=64, run_uri=run_uri, **size)
    report = run_chaos(options, show)
    print("\n".join(report.lines()))
    assert report.is_identical
    assert report.missing == report.duplicates == []
    assert len(report.kills) == NUM_KILLS


class SmallDisk:
    """A file system that is full for a while, again and again, from `begin` on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ended = threading.Event()
        self._filler = threading.Thread(target=self._fill_again_and_again)
        self.num_times_full = 0

    def begin(self) -> None:
        self._folder.mkdir(parents=True)
        options = ["-t", "tmpfs", "-o", f"size={DISK_MIB}m", f"swiftbatch-{os.getpid()}"]
        subprocess.run(["mount", *options, self._folder], check=True)
        self._filler.start()

    def end(self) -> None:
        self._ended.set()
        if self._filler.ident is not None:
            self._filler.join()
        subprocess.run(["umount", "--lazy", self._folder], check=False)

    def _fill_again_and_again(self) -> None:
        while not self._ended.wait(FREE_SECONDS):
            ballast = self._folder / "ballast"
            try:
                with ballast.open("wb", buffering=0) as file:
                    for _ in itertools.count():
                        file.write(bytes(4096))
            except OSError as error:
                self.num_times_full += error.errno == errno.ENOSPC
            self._ended.wait(FULL_SECONDS)
            ballast.unlink(missing_ok=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    disk = SmallDisk(tmp_path / "runs" / "disturbed")
    yield disk
    disk.end()


@needs_root
def test_a_disk_that_is_full_again_and_again_changes_no_token(
    tiny_model: Path, small_disk: SmallDisk, tmp_path: Path
) -> None:
    def show(line: str) -> None:
        print(line, flush=True)
        if line.startswith("disturbed run"):
            small_disk.begin()

    run_with(tiny_model, str(tmp_path / "runs"), 24, show)
    assert small_disk.num_times_full > 2


def test_a_bad_day_of_s3_changes_no_token(tiny_model: Path, s3_proxy: FaultProxy, s3_uri: str) -> None:
    def show(line: str) -> None:
        print(line, flush=True)
        if line.startswith("disturbed run"):
            s3_proxy.chances = {"unavailable": 0.05, "refused": 0.03, "lost": 0.03, "cut": 0.03}

    run_with(tiny_model, s3_uri, 240, show)  # fewer have ended before the last kill
    assert {"unavailable", "refused", "lost", "cut"} <= set(s3_proxy.num_faults)
