"""Every batch's end is posted until taken, and only to allowed hosts."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from swiftbatch.jobs.storage.retries import Backoff
from swiftbatch.jobs.storage.store import Store
from swiftbatch.scheduler.display.webhooks import SECRET_VARIABLE, Receiver
from swiftbatch.scheduler.serve.batches import batch_webhooks
from swiftbatch.scheduler.serve.batches.batch_webhooks import (
    BatchWebhooks,
    Receivers,
    WebhookHosts,
    WebhookHostsError,
    reach,
)
from swiftbatch.scheduler.serve.records.server_records import Counts, Ended, NewBatch, RefusedError
from swiftbatch.scheduler.serve.records.stored_objects import Batch, Batches, StoredFiles
from tests.scheduler.display.receivers import KEY, SECRET, receiver, redirect, status
from tests.scheduler.driving import wait_until


class Server:
    started: ClassVar[list[Server]] = []  # by one test

    def __init__(self, folder: Path, url: str | None = None, hosts: str | None = None) -> None:
        store = Store(str(folder))
        of_server = None if url is None else Receiver.parse(url, SECRET)
        self.hooks = BatchWebhooks(store, Receivers(of_server, hosts))
        self.files = StoredFiles(store)
        self.batches = Batches(store, self.hooks.tell, self.hooks.prepare)
        self.hooks.take_up(self.batches)
        self.hooks.start()
        self.started.append(self)

    def ended(self, webhook: str | None = None) -> Batch:
        file = self.files.add(io.BytesIO(b"{}"), "x", "batch", None)
        new = NewBatch(
            input_file_id=file.id,
            endpoint="/v1/completions",
            completion_window="1h",
            metadata={"for": "a test"},
            webhook=webhook,
        )
        batch = self.batches.create(new, new.seconds, None)
        end = Ended(state="completed", counts=Counts(total=1), in_progress=1.0, finalizing=2.0, ended=time.time())
        self.batches.end(batch, end)
        return batch


@pytest.fixture(autouse=True)
def stopped() -> Iterator[None]:
    """Stops a failed test's servers, whose threads would delay the end of all tests."""
    yield
    while Server.started:
        Server.started.pop().hooks.stop()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_webhooks, "RETRY_BACKOFF", Backoff(first=0.05, longest=3600.0))
    monkeypatch.setattr(batch_webhooks, "POLL_SECONDS", 0.02)
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)


def left(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("webhooks/[!.]*")]


def test_an_end_is_told_signed_as_openai_tells_it_until_it_is_taken(tmp_path: Path) -> None:
    import openai

    with receiver(status(500, 404, 204)) as inbox:
        server = Server(tmp_path, inbox.url)
        batch = server.ended()
        tries = inbox.wait_for(3)
        wait_until(lambda: not left(tmp_path))
        server.hooks.stop()
    assert len(tries) == 3
    assert len({request.headers["webhook-id"] for request in tries}) == 1
    client = openai.OpenAI(api_key="none", webhook_secret=SECRET)
    event: Any = client.webhooks.unwrap(tries[-1].body, tries[-1].headers)
    assert (event.type, event.data.id) == ("batch.completed", batch.id)
    assert tries[-1].message["data"]["request_counts"] == {"total": 1, "completed": 0, "failed": 0}
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(tries[-1].body.replace(b"completed", b"cancelled"), tries[-1].headers)
    assert len(KEY) == 32


def test_what_a_killed_server_had_to_tell_the_next_one_tells(tmp_path: Path) -> None:
    with receiver(status(503)) as away:
        server = Server(tmp_path, away.url, "127.0.0.1=loopback")
        ids = {server.ended(away.url).id for _ in range(3)}
        away.wait_for(2)
        server.hooks.stop()  # nothing was taken, everything is in the store
    assert {name.removesuffix(".json") for name in left(tmp_path)} == ids
    with receiver(status(200)) as inbox:
        server = Server(tmp_path, inbox.url)  # the batches' own address is no longer allowed and is given up
        wait_until(lambda: not left(tmp_path))
        server.hooks.stop()
    assert {request.message["data"]["id"] for request in inbox.requests} == ids
    assert len(inbox.requests) == 3


def test_an_end_that_a_kill_cut_off_is_not_told_before_it_is_one(tmp_path: Path) -> None:
    with receiver(status(200)) as inbox:
        server = Server(tmp_path, inbox.url)
        server.hooks.stop()
        batch = server.ended()
        (tmp_path / "batches" / batch.id / "ended.json").unlink()
        server = Server(tmp_path, inbox.url)
        time.sleep(0.2)
        server.hooks.stop()
    assert inbox.requests == []
    assert left(tmp_path) == [f"{batch.id}.json"]


def test_one_that_is_away_holds_up_no_other_and_is_given_up_after_days(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with receiver(status(200)) as inbox:
        server = Server(tmp_path, inbox.url, "localhost=loopback")
        for _ in range(5):
            server.ended("http://localhost:9/dead")
        assert len(inbox.wait_for(5)) == 5
        assert len(left(tmp_path)) == 5
        monkeypatch.setattr(batch_webhooks, "GIVEN_UP_SECONDS", -1.0)
        wait_until(lambda: not left(tmp_path))
        server.hooks.stop()
    told = capfd.readouterr().err
    assert told.count("is given up") == 5
    assert "dead" not in told  # the path may be a secret


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("8.8.8.8", "public"),
        ("2606:4700::1", "public"),
        ("127.0.0.1", "loopback"),
        ("127.9.9.9", "loopback"),
        ("::1", "loopback"),
        ("::ffff:127.0.0.1", "loopback"),
        ("10.0.0.1", "private"),
        ("172.16.0.1", "private"),
        ("192.168.1.1", "private"),
        ("::ffff:10.0.0.1", "private"),
        ("100.64.0.1", "private"),
        ("fd00::1", "private"),
        ("169.254.169.254", "forbidden"),
        ("::ffff:169.254.169.254", "forbidden"),
        ("fe80::1", "forbidden"),
        ("0.0.0.0", "forbidden"),
        ("::", "forbidden"),
        ("224.0.0.1", "forbidden"),
        ("ff02::1", "forbidden"),
        ("255.255.255.255", "forbidden"),
        ("240.0.0.1", "forbidden"),
        ("2002:7f00:1::", "forbidden"),
        ("64:ff9b::7f00:1", "forbidden"),
    ],
)
def test_an_address_leads_where_it_leads(address: str, expected: str) -> None:
    assert reach(address) == expected


def test_hosts_are_allowed_by_name_and_inner_addresses_only_where_that_is_said() -> None:
    hosts = WebhookHosts.parse("hooks.example.com, *.example.org,10.0.0.5=private,localhost=loopback")
    assert hosts.allowed("Hooks.Example.com") == hosts.allowed("a.b.example.org") == {"public"}
    assert hosts.allowed("10.0.0.5") == {"public", "private"}
    for name in ("example.org", "example.com", "x.hooks.example.com", "evilexample.org", "10.0.0.6", "", "org"):
        assert hosts.allowed(name) == set()
    for text in ("a=public", "a=forbidden", "http://a", "a/b", "*", "*.*.a b"):
        with pytest.raises(WebhookHostsError, match="--webhook-hosts"):
            WebhookHosts.parse(text)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/",
        "http://[::1]/",
        "http://0x7f.1/",
        "http://2130706433/",
        "http://localhost/",
        "http://169.254.169.254/latest/meta-data",
        "http://10.0.0.1/",
        "http://hooks.example.com.evil.example/",
        "http://user@hooks.example.com/",
        "http://hooks.example.com@127.0.0.1/",
        "file:///etc/passwd",
        "gopher://hooks.example.com/",
        "http://hooks.example.com\r\nX: y",
        "",
    ],
)
def test_no_batch_names_a_host_that_is_not_allowed(url: str) -> None:
    receivers = Receivers(None, "hooks.example.com,169.254.169.254=private,10.0.0.1")
    with pytest.raises(RefusedError) as refused:
        receivers.check(url)
    assert refused.value.param == "webhook"
    receivers.check("https://hooks.example.com/x")
    with pytest.raises(RefusedError):
        Receivers(None, None).check("https://hooks.example.com/x")


def test_a_name_that_leads_inside_is_not_posted_to_and_the_address_that_was_looked_at_is_the_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The name server gives one address at first, and another later."""
    answers: list[str] = []

    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        answers.append("127.0.0.1" if answers else "203.0.113.1")
        return [(2, 1, 6, "", (answers[-1], port))]

    dialled: list[Any] = []

    def connect(address: Any, _timeout: float) -> Any:
        dialled.append(address)
        raise ConnectionRefusedError("refused")

    with receiver(status(200)) as inbox:
        port = int(inbox.url.split(":")[2].split("/")[0])
        monkeypatch.setattr(batch_webhooks.socket, "getaddrinfo", resolve)
        monkeypatch.setattr(batch_webhooks.socket, "create_connection", connect)
        monkeypatch.setattr(batch_webhooks, "reach", lambda ip: "public" if ip.startswith("203.") else "loopback")
        server = Server(tmp_path, None, "rebinding.example")
        server.ended(f"http://rebinding.example:{port}/x")
        wait_until(lambda: len(answers) >= 3)
        server.hooks.stop()
    assert inbox.requests == []
    assert dialled == [("203.0.113.1", port)]
    assert "refused" in capfd.readouterr().err


def test_a_redirect_is_not_followed(tmp_path: Path) -> None:
    with receiver(redirect) as inbox:
        server = Server(tmp_path, None, "127.0.0.1=loopback")
        server.ended(inbox.url)
        inbox.wait_for(2)
        server.hooks.stop()
    assert {request.path for request in inbox.requests} == {"/hooks?key=hidden"}
    assert json.loads(inbox.requests[0].body)["type"] == "batch.completed"


def test_what_was_not_taken_goes_behind_what_else_waits_for_its_host() -> None:
    lane = batch_webhooks.ReceiverQueue()
    lane.items.extend(["refused", "next"])  # what they are is no matter
    lane.fail()
    assert list(lane.items) == ["next", "refused"]
    assert not lane.is_due()
    lane.succeed()
    assert list(lane.items) == ["refused"]
    assert lane.is_due()
