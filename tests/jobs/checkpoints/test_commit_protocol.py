"""`kill -9` at every step of the commit protocol loses no acknowledged data."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.checkpoints.token_log import PackedLogs
from swiftbatch.jobs.run.result_files import SEGMENTS
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.storage.store import Store
from tests.jobs.checkpoints.checkpoint_parts import FINGERPRINT, JOB, check_checkpoints
from tests.jobs.checkpoints.commit_steps import NUM_POSITIONS, finish, result, run_attempt
from tests.jobs.run.run_parts import MANIFEST

pytestmark = pytest.mark.long

SCRIPT = Path(__file__).parent / "commit_steps.py"


@pytest.fixture(scope="module", params=[5, pytest.param(1, marks=pytest.mark.slow)], ids="at each {}".format)
def killed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The runs of processes killed before each, or each fifth, of their file operations."""
    folder = tmp_path_factory.mktemp("killed")
    # in its own process, because a forked child of this threaded one might hang
    command = [sys.executable, SCRIPT, folder, str(request.param)]
    script = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert script.returncode == 0, script.stderr
    num_steps = int(script.stdout)
    assert num_steps > 100
    return [folder / f"{last}" for last in range(1, num_steps + 1, request.param)]


def acknowledged(folder: Path) -> tuple[int, int]:
    lines = Path(f"{folder}.acknowledged").read_text().splitlines()
    num_tokens, num_positions = lines[-1].split() if lines else (0, 0)
    return int(num_tokens), int(num_positions)


def test_what_was_flushed_is_there_wherever_the_process_was_killed(
    killed: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    for folder in killed:
        store, checkpoints = Store(str(folder)), CheckpointStore(Store(str(folder)), FINGERPRINT)
        run = Run(store, MANIFEST)
        if JOB in run.ended()[0]:
            assert run.result(JOB) == result(), folder
            continue
        packed = PackedLogs(store, FINGERPRINT)
        packed.put_in_place(packed.found())
        num_tokens, num_positions = check_checkpoints(checkpoints)
        assert num_tokens >= acknowledged(folder)[0], folder
        assert num_positions >= acknowledged(folder)[1], folder
        for manifest in checkpoints.read_manifests(JOB):
            assert all(checkpoints.read_segment(JOB, entry) for entry in manifest.segments), folder
            assert manifest.drafter is None or checkpoints.read_drafter(JOB, manifest.drafter), folder
    # a kill leaves files unwritten, never damaged
    assert {record.getMessage().split(": ")[1].split(";")[0] for record in caplog.records} <= {"found no file"}


def test_a_run_that_was_killed_anywhere_is_resumed_to_its_end(
    killed: list[Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.ERROR)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # fsync would only take time here
    for folder in killed:
        store = Store(str(folder))
        if Run(store, MANIFEST).result(JOB) is None:
            run_attempt(store, NUM_POSITIONS)
            finish(store)
            assert store.list("checkpoints") in ([], ["workers"])
            assert store.list("checkpoints/workers") == []
        run = Run(store, MANIFEST)
        assert run.result(JOB) == result()
        assert len(store.list(SEGMENTS)) == 1
        assert run.damaged == {}
