from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import ProcessKey
from swiftbatch.jobs.storage.store import Store
from swiftbatch.scheduler.driver.run_lease import LeaseEpoch, RunTakenError, process_liveness, refuse_if_taken
from swiftbatch.scheduler.process.process_id import is_gone, own_key
from tests import ROOT
from tests.jobs.run.run_parts import MANIFEST

HERE = os.uname().nodename
CLAIM = (
    "import sys, time; from swiftbatch.jobs.run.run import Run\n"
    "from swiftbatch.scheduler.driver.run_lease import RunLease\n"
    "hold = RunLease(Run.open(sys.argv[1])); print('held', flush=True); time.sleep(float(sys.argv[2]))"
)
UNSHARED = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


def needs(command: list[str]) -> None:
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        pytest.skip(f"not permitted here: {command[0]}")


@pytest.fixture
def key() -> ProcessKey:
    found = own_key()
    if found is None:
        pytest.skip("the system does not tell processes apart")
    return found


def test_a_process_with_the_number_of_one_that_ended_is_another(key: ProcessKey) -> None:
    assert not is_gone(HERE, os.getpid(), key)
    assert is_gone(HERE, os.getpid(), key.model_copy(update={"start_ticks": key.start_ticks - 1}))
    assert is_gone("renamed meanwhile", 2**22 + 1, key)


@pytest.mark.parametrize("field", ["boot_id", "pid_namespace"])
def test_of_a_process_out_of_sight_only_the_heartbeat_tells(key: ProcessKey, tmp_path: Path, field: str) -> None:
    far, store, now = key.model_copy(update={field: "another"}), Store(str(tmp_path)), time.time()
    for pid in (os.getpid(), 2**22 + 1):
        assert process_liveness(store, HERE, pid, far, now - 3) == "alive"
        assert process_liveness(store, HERE, pid, far, now - 100) == "silent"


def test_a_process_that_has_ended_and_was_not_reaped_is_gone(key: ProcessKey) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    try:
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        assert is_gone(HERE, child, key)
    finally:
        os.waitpid(child, 0)


def test_where_nothing_more_is_known_host_and_number_tell() -> None:
    assert not is_gone(HERE, os.getpid(), None)
    assert is_gone(HERE, 2**22 + 1, None)
    assert not is_gone("elsewhere", 2**22 + 1, None)


def test_a_live_driver_in_a_container_is_not_taken_for_dead_nor_one_with_its_number_for_it(tmp_path: Path) -> None:
    needs(UNSHARED)
    run = Run.planned(str(tmp_path / "run"), MANIFEST).made()
    command = [*UNSHARED, sys.executable, "-c", CLAIM, run.store.uri]
    with subprocess.Popen([*command, "60"], cwd=ROOT, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "held\n"
        progress = run.progress()
        assert (progress.driver_host, progress.driver_pid) == (HERE, 1)
        with pytest.raises(RunTakenError, match="process 1 on"):
            LeaseEpoch.begin(run, may_take_over=True)
        again = subprocess.run([*command, "0"], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert "held by another driver" in again.stderr
        first.kill()
    silent = {"state": "running", "updated": time.time() - 100}
    run.write_progress(progress.model_copy(update=silent))  # a hundred seconds later
    with pytest.raises(RunTakenError, match="add --takeover"):
        refuse_if_taken(run)
    LeaseEpoch.begin(run, may_take_over=True)
