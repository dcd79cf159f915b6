"""Webhooks of commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.run.run import Run
from swiftbatch.scheduler.cli import main
from swiftbatch.scheduler.commands.options.launch_options import shown
from swiftbatch.scheduler.display import webhooks as sending
from swiftbatch.scheduler.display.events import JobCancelled, JobFinished, JobGivenUp, JobStarted, RunEnded, RunOpened
from swiftbatch.scheduler.display.webhooks import INTERRUPTED_SECONDS, PATIENCE_SECONDS, Receiver, posting
from tests.scheduler.display.receivers import SECRET, receiver, status
from tests.scheduler.driver.driver_parts import RecordingDisplay, make_run

OPENED = RunOpened("s3://bucket/run", "run-1", 3)
ENDED = RunEnded("s3://bucket/run", "finished", {"finished": 2, "failed": 1}, ("a", "b"), None, 1, 40)


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "RETRY_BACKOFF", lambda state: 0.05)
    monkeypatch.setattr(sending, "LEAST_SECONDS", 0.3)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Has no jobs, so it ends at once without Ray."""
    monkeypatch.setenv("SWIFTBATCH_WEBHOOK_SECRET", SECRET)
    return make_run(tmp_path / "run", {})


def resume(run: Run, *args: str) -> Result:
    return CliRunner().invoke(main, ["resume", run.store.uri, *args])


def test_a_run_s_end_is_posted_without_secrets_and_again_under_the_same_id(run: Run) -> None:
    with receiver(status(200)) as inbox:
        first, second = (resume(run, "--webhook", inbox.url) for _ in range(2))
        requests = inbox.requests
    assert [first.exit_code, second.exit_code] == [0, 0]
    assert len(requests) == 2
    message = requests[0].message
    assert message["type"] == "run.ended"
    data = {"run_id": "run", "run": run.store.uri, "state": "finished", "limit": None, "exit_code": 0}
    assert message["data"] == data | {"num_tokens": 0, "jobs": message["data"]["jobs"]}
    assert requests[0].headers["webhook-id"] == requests[1].headers["webhook-id"]
    kept = b"".join(path.read_bytes() for path in Path(run.store.uri).rglob("*") if path.is_file())
    for text in (first.output.encode(), kept, requests[0].body):
        assert b"hidden" not in text  # of the address
        assert SECRET.removeprefix("whsec_").encode() not in text


def test_a_dead_receiver_is_told_of_once_and_changes_no_exit_code(run: Run) -> None:
    with receiver(status(404)) as inbox:
        address = inbox.url
        refused = resume(run, "--webhook", address, "--quiet")
    assert refused.exit_code == 0
    place = address.partition("/hooks")[0]
    said = f"webhook {place}: not delivered, it answered 404; the run goes on\n"
    assert refused.stderr == said
    assert "run finished" in refused.stdout


def test_each_end_of_a_job_is_posted_where_asked_for(run: Run) -> None:
    with receiver(status(200)) as inbox:
        for with_jobs in (True, False):
            with posting(RecordingDisplay(), Receiver.parse(inbox.url, SECRET), with_jobs) as display:
                display.note(OPENED)
                display.note(JobStarted("a", "w1", 1, 0))
                display.note(JobFinished("a", 40))
                display.note(JobGivenUp("b", "given up: at s3://KEY:SECRET@bucket"))
                display.note(JobCancelled("c[1]"))
                if with_jobs:
                    inbox.wait_for(3)
                display.note(ENDED)
        messages = [request.message for request in inbox.requests]
    of_run = {"run_id": "run-1", "run": "s3://bucket/run"}
    assert [message["type"] for message in messages] == ["job.ended"] * 3 + ["run.ended"] * 2
    assert [message["data"] for message in messages[:3]] == [
        of_run | {"custom_id": "a", "state": "finished", "num_tokens": 40},
        of_run | {"custom_id": "b", "state": "failed"},
        of_run | {"custom_id": "c[1]", "state": "cancelled"},
    ]
    assert messages[3]["data"]["jobs"] == {"finished": 2, "failed": 1}
    assert (messages[3]["data"]["num_tokens"], messages[3]["data"]["exit_code"]) == (40, 1)


def stop(target: Receiver, is_opened: bool) -> None:
    """Fail before or after the run is opened."""
    with posting(RecordingDisplay(), target, True) as display:
        if is_opened:
            display.note(OPENED)
        raise UserError("the disk is full at /home/SECRET")


def test_a_run_that_has_to_stop_is_posted_too_and_a_refused_command_is_not() -> None:
    with receiver(status(200)) as inbox:
        target = Receiver.parse(inbox.url, SECRET)
        for is_opened in (True, False):
            with pytest.raises(UserError, match="the disk is full"):
                stop(target, is_opened)
        (request,) = inbox.requests
    assert request.message["data"]["state"] == "interrupted"
    assert request.message["data"]["exit_code"] == 2
    assert "SECRET" not in json.dumps(request.message)


def test_an_interrupted_user_waits_for_a_dead_receiver_for_seconds_only(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(sending.WebhookSender, "finish", lambda sender, message, seconds: waits.append(seconds))
    ends = (("interrupted", None), ("interrupted", "--deadline"), ("finished", None))
    for state, limit in ends:
        with posting(RecordingDisplay(), Receiver.parse("http://127.0.0.1:9/", SECRET), False) as told:
            told.note(OPENED)
            told.note(RunEnded("s3://bucket/run", state, {"pending": 1}, ("a", "b"), limit, 130))
    assert waits == [INTERRUPTED_SECONDS, PATIENCE_SECONDS, PATIENCE_SECONDS]
    assert INTERRUPTED_SECONDS <= 5 < PATIENCE_SECONDS


def test_a_command_without_a_webhook_shows_on_the_plain_display() -> None:
    options = {"quiet": True, "as_json": False, "webhook": None, "webhook_jobs": False, "num_workers": 2}
    with shown(options) as display:
        assert type(display).__name__ == "QuietDisplay"
    assert options == {"num_workers": 2}
