"""One driver holds a run; an overtaken one stops and changes nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import DriverClaim, Progress, read_model
from swiftbatch.metrics.counters import DriverCounters
from swiftbatch.scheduler.cluster.ray_cluster import Cluster
from swiftbatch.scheduler.driver import run_lease
from swiftbatch.scheduler.driver.run_lease import LeaseEpoch, RunTakenError, current_progress, refuse_if_taken
from swiftbatch.scheduler.runs import cancellation
from swiftbatch.scheduler.runs.cancellation import cancel_jobs
from tests.scheduler.driver.driver_parts import RecordingDisplay, job_id, make_driver, make_run, result_metrics

HERE = os.uname().nodename


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path / "run", {"a": 300, "b": 300})


@pytest.fixture
def dead_pid() -> int:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)
    return pid


def beat(run: Run, *, host: str, pid: int, age: float, state: str = "running") -> Progress:
    now = time.time()
    changes = {
        "state": state,
        "driver_host": host,
        "driver_pid": pid,
        "driver_process": None,
        "updated": now - age,
        "started": now - age - 60,
    }
    progress = current_progress(run).model_copy(update=changes)
    run.write_progress(progress)
    return progress


def overtaken(run: Run) -> LeaseEpoch:
    progress = current_progress(run)
    silent = {"state": "running", "driver_host": "elsewhere", "driver_process": None, "updated": time.time() - 100}
    run.write_progress(progress.model_copy(update={**silent, "epoch": 99}))
    return LeaseEpoch.begin(run, may_take_over=True)


def test_a_run_that_nobody_holds_is_free(run: Run, dead_pid: int) -> None:
    refuse_if_taken(run)
    beat(run, host="elsewhere", pid=1, age=0, state="interrupted")
    refuse_if_taken(run)
    beat(run, host=HERE, pid=dead_pid, age=0)  # killed a moment ago
    refuse_if_taken(run)


@pytest.mark.parametrize("may_take_over", [False, True])
@pytest.mark.parametrize(("host", "pid"), [("elsewhere", 1), (HERE, os.getpid())], ids=["elsewhere", "here"])
def test_a_run_that_is_at_work_is_refused_with_who_holds_it_and_since_when(
    run: Run, host: str, pid: int, may_take_over: bool
) -> None:
    held = beat(run, host=host, pid=pid, age=3)
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(held.started))
    with pytest.raises(RunTakenError) as caught:
        refuse_if_taken(run, may_take_over)
    text = str(caught.value)
    assert f"held by another driver, process {pid} on {host}, since {since}, last heard of 3 s ago" in text
    assert "--takeover" not in text


@pytest.mark.parametrize(("host", "pid"), [("elsewhere", 1), (HERE, os.getpid())], ids=["elsewhere", "here"])
def test_a_run_whose_driver_is_silent_is_taken_over_on_demand_only(run: Run, host: str, pid: int) -> None:
    beat(run, host=host, pid=pid, age=100)
    with pytest.raises(RunTakenError, match=f"process {pid} on {host}.* last heard of 100 s ago.* add --takeover"):
        refuse_if_taken(run)
    refuse_if_taken(run, may_take_over=True)


def test_a_driver_whose_clock_is_ahead_is_not_taken_for_one_at_work_for_ever(run: Run) -> None:
    beat(run, host="elsewhere", pid=1, age=-3600)
    with pytest.raises(RunTakenError, match=r"whose clock is ahead of ours; .*--takeover"):
        refuse_if_taken(run)
    refuse_if_taken(run, may_take_over=True)


def test_the_newest_claim_holds_the_run(run: Run) -> None:
    first = LeaseEpoch.begin(run)
    first.check()
    second = overtaken(run)
    assert (first.number, second.number) == (1, 2)
    second.check()
    with pytest.raises(RunTakenError, match=rf"taken over by process {os.getpid()} on {HERE} at 20\d\d-"):
        first.check()
    assert run.store.list("drivers") == ["0001.json", "0002.json"]


def test_a_run_whose_folder_has_gone_is_held_no_more(run: Run) -> None:
    epoch = LeaseEpoch.begin(run)
    Path(run.store.uri).rename(f"{run.store.uri}-moved")
    with pytest.raises(RunTakenError, match=r"no longer there: drivers/0001.json has gone with its folder"):
        epoch.check()


def test_of_two_claims_to_one_epoch_the_one_that_stands_holds(run: Run) -> None:
    epoch = LeaseEpoch.begin(run)
    other = epoch.claim.model_copy(update={"driver_id": "another", "host": "elsewhere", "pid": 5})
    run.store.write("drivers/0001.json", other.model_dump_json().encode())  # as an object store would allow
    with pytest.raises(RunTakenError, match="process 5 on elsewhere"):
        epoch.check()


def test_a_second_driver_is_refused_while_the_first_is_alive(run: Run, cluster: Cluster) -> None:
    display, refused = RecordingDisplay(), []

    def try_second(progress: Progress) -> None:
        if progress.state == "running" and progress.workers and not refused:
            with pytest.raises(RunTakenError, match="another driver") as caught:
                make_driver(run, cluster, RecordingDisplay(), may_take_over=True).run()
            refused.append(caught.value)

    display.on_update = try_second
    assert make_driver(run, cluster, display, workers=1, slots=2).run() == "finished"
    assert refused
    assert [update.epoch for update in display.updates if update.epoch != 1] == []


def test_a_driver_that_was_overtaken_stops_and_touches_nothing(tmp_path: Path, cluster: Cluster) -> None:
    run, display, counters = make_run(tmp_path / "run", {"a": 100_000}), RecordingDisplay(), DriverCounters()
    others: list[Progress] = []

    def take_over(progress: Progress) -> None:
        if progress.num_generated_tokens > 20 and not others:
            epoch = overtaken(run)
            others.append(progress.model_copy(update={"epoch": epoch.number, "driver_host": "elsewhere"}))
            run.write_progress(others[0])

    display.on_update = take_over
    with pytest.raises(RunTakenError, match="taken over"):
        make_driver(run, cluster, display, workers=1, counters=counters).run()
    assert run.progress() == others[0]
    assert not run.ended()[1]
    assert len(run.store.list(f"checkpoints/{job_id(run, 'a')}")) == 1


def test_what_a_dead_driver_last_reported_counts_as_recomputed(run: Run, cluster: Cluster, dead_pid: int) -> None:
    driver, display = make_driver(run, cluster, RecordingDisplay()), RecordingDisplay()
    driver.request_stop()
    driver.run()
    held = beat(run, host=HERE, pid=dead_pid, age=0)
    run.write_progress(held.model_copy(update={"running": {"a": 150}}))  # it lacks a checkpoint
    assert make_driver(run, cluster, display, workers=1, slots=2).run() == "finished"
    assert result_metrics(run, "a")["num_reported_tokens"] == 150
    assert result_metrics(run, "b")["num_reported_tokens"] == 0


def test_to_cancel_a_run_whose_driver_is_silent_keeps_that_driver_from_going_on(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (cancellation, run_lease):  # the longest wait
        monkeypatch.setattr(module, "STALE_SECONDS", 0.5)
    silent = LeaseEpoch.begin(run)
    beat(run, host="elsewhere", pid=1, age=100)
    assert cancel_jobs(run, None) == "cancelled 2 jobs"
    with pytest.raises(RunTakenError):
        silent.check()


def test_a_claim_tells_the_host_and_process_and_no_address_of_the_run(run: Run) -> None:
    LeaseEpoch.begin(run)
    claim = read_model(run.store, "drivers/0001.json", DriverClaim)
    assert (claim.host, claim.pid) == (HERE, os.getpid())
    assert run.store.uri not in run.store.read("drivers/0001.json").decode()
