from __future__ import annotations

import json

from swiftbatch.jobs.run.run import Run
from swiftbatch.scheduler.driver.run_lease import current_progress
from tests.scheduler.commands.command_parts import finish, invoke

PRICE = "--price-per-worker-hour"


def work(run: Run, hours: float) -> None:
    run.write_progress(current_progress(run).model_copy(update={"worker_seconds": hours * 3600}))


def test_the_worker_hours_of_a_run_cost_its_newest_price(run: Run) -> None:
    for name in "abc":
        finish(run, name, "text")
    work(run, 1.5)
    assert "cost" not in invoke("status", run.store.uri).stdout
    assert json.loads(invoke("status", run.store.uri, "--json").stdout)["cost"] is None
    for more, told in (
        ([PRICE, "4"], "cost: 6.00 for 1.5 worker hours at 4.00 each; 400,000.00 per million tokens\n"),
        ([], "cost: 6.00 for 1.5 worker hours at 4.00 each; 400,000.00 per million tokens\n"),
        ([PRICE, "0.0002"], "cost: 0.0003 for 1.5 worker hours at 0.0002 each; 20.00 per million tokens\n"),
        ([PRICE, "0"], "cost: 0 for 1.5 worker hours at 0 each; 0 per million tokens\n"),
    ):
        assert invoke("resume", run.store.uri, *more).exit_code == 0
        assert told in invoke("status", run.store.uri).stdout
    assert json.loads(invoke("status", run.store.uri, "--json").stdout)["cost"] == 0


def test_a_stopped_run_has_its_price_still(run: Run) -> None:
    work(run, 2.0)
    invoke("resume", run.store.uri, PRICE, "3", "--deadline", "2020-01-01T00:00")
    assert "cost: 6.00 for 2 worker hours at 3.00 each\n" in invoke("status", run.store.uri).stdout
    killed = {"state": "running", "driver_pid": 2**22 + 1}
    run.write_progress(current_progress(run).model_copy(update=killed))
    assert current_progress(run).cost == 6.0
