from __future__ import annotations

import json

from swiftbatch.jobs.run.run import Run
from tests.scheduler.commands.command_parts import finish, invoke, pretend_to_run, refusal


def test_cancel_without_a_driver_takes_effect_at_once(run: Run) -> None:
    finish(run, "b", "text of b")
    assert "cancelled job a" in invoke("cancel", run.store.uri, "a").output
    assert "ended already" in invoke("cancel", run.store.uri, "b").output
    assert "no job 'z'" in refusal("cancel", run.store.uri, "z")
    assert "cancelled 1 jobs" in invoke("cancel", run.store.uri).output
    status = json.loads(invoke("status", run.store.uri, "--json").output)
    assert status["state"] == "cancelled"
    assert status["jobs"] == {"pending": 0, "running": 0, "finished": 1, "failed": 0, "cancelled": 2}
    lines = [json.loads(line) for line in invoke("results", run.store.uri).output.splitlines()]
    assert [(line["custom_id"], line["error"] and line["error"]["code"]) for line in lines] == [
        ("a", "cancelled"),
        ("b", None),
        ("c", "cancelled"),
    ]


def test_cancel_with_a_driver_only_asks_it(run: Run) -> None:
    pretend_to_run(run)
    assert "asked the driver" in invoke("cancel", run.store.uri, "a").output
    assert run.cancel_requests() == (False, {run.jobs()[0].job_id})
    assert not run.ended()[1]
    assert "held by another driver" in refusal("resume", run.store.uri)
