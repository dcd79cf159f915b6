from __future__ import annotations

import base64
import hashlib
import hmac
import re
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from swiftbatch.scheduler.display import webhooks as sending
from swiftbatch.scheduler.display.webhooks import (
    PATIENCE_SECONDS,
    PostError,
    Receiver,
    WebhookMessage,
    WebhookSender,
    post,
)
from tests.scheduler.display.receivers import KEY, SECRET, receiver, redirect, silence, slow_body, slow_head, status
from tests.simulated_clock import SimulatedClock

pytestmark = pytest.mark.long

END = WebhookMessage("run.ended", {"run_id": "run-1", "state": "finished", "jobs": {"finished": 2}})
JOB = WebhookMessage("job.ended", {"run_id": "run-1", "custom_id": "ä", "state": "finished", "num_tokens": 7})


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "RETRY_BACKOFF", lambda state: 0.05)


def test_a_message_is_signed_as_standard_webhooks_has_it() -> None:
    with receiver(status(204)) as inbox:
        sender = WebhookSender(Receiver.parse(inbox.url, SECRET))
        sender.put(JOB)
        sender.finish(END, 60)
        requests = {request.headers["webhook-id"]: request for request in inbox.requests}
    assert sender.failure is None
    assert requests.keys() == {JOB.id, END.id}
    for request in requests.values():
        timestamp = request.headers["webhook-timestamp"]
        assert abs(int(timestamp) - time.time()) < 60
        signed = f"{request.headers['webhook-id']}.{timestamp}.".encode() + request.body
        digest = hmac.new(KEY, signed, hashlib.sha256).digest()
        assert request.headers["webhook-signature"] == "v1," + base64.b64encode(digest).decode()
        assert request.headers["content-type"] == "application/json"
        assert request.path == "/hooks?key=hidden"
    message = requests[JOB.id].message
    assert (message["type"], message["data"]) == ("job.ended", dict(JOB.data))
    assert message["timestamp"].endswith("+00:00")


def test_without_a_secret_there_is_no_signature() -> None:
    with receiver(status(200)) as inbox:
        WebhookSender(Receiver.parse(inbox.url, None)).finish(END, 60)
        (request,) = inbox.requests
    assert "webhook-signature" not in request.headers
    assert request.headers["webhook-id"] == END.id


def test_the_same_news_has_the_same_id_whoever_tells_it_and_other_news_another() -> None:
    again = WebhookMessage("run.ended", {"jobs": {"finished": 2}, "state": "finished", "run_id": "run-1"}, moment=5.0)
    assert again.id == END.id
    assert len({END.id, JOB.id, WebhookMessage("run.ended", {**END.data, "state": "cancelled"}).id}) == 3


@pytest.mark.parametrize("code", [500, 503, 429, 408])
def test_a_server_in_trouble_is_tried_again_until_it_takes_the_message(code: int) -> None:
    with receiver(status(code, code, 200)) as inbox:
        sender = WebhookSender(Receiver.parse(inbox.url, SECRET))
        sender.finish(END, 60)
        assert len(inbox.requests) == 3
    assert sender.failure is None
    assert {request.headers["webhook-id"] for request in inbox.requests} == {END.id}


@pytest.mark.parametrize(("code", "num_tries"), [(404, 1), (400, 1), (401, 1)])
def test_a_server_that_refuses_is_not_tried_again(code: int, num_tries: int) -> None:
    with receiver(status(code)) as inbox:
        sender = WebhookSender(Receiver.parse(inbox.url, SECRET))
        sender.finish(END, 60)
        assert len(inbox.requests) == num_tries
    assert sender.failure == f"it answered {code}"


def test_a_redirect_is_not_followed() -> None:
    with receiver(redirect) as inbox:
        sender = WebhookSender(Receiver.parse(inbox.url, SECRET))
        sender.finish(END, 60)
        assert len(inbox.requests) == 1
    assert sender.failure == "it answered 307: redirects are not followed, give the address that it leads to"


def test_a_body_without_end_is_not_read() -> None:
    with receiver(slow_body) as inbox:
        sender = WebhookSender(Receiver.parse(inbox.url, SECRET))
        sender.finish(END, 60)
        assert len(inbox.requests) == 1
    assert sender.failure is None


@pytest.mark.parametrize("answer", [silence, slow_head])
def test_a_receiver_that_hangs_is_left(answer: Callable[[Any, int], None]) -> None:
    with receiver(answer) as inbox, pytest.raises(PostError, match=r"^no answer within 0\.4 s$"):
        post(Receiver.parse(inbox.url, SECRET), END, 0.4)


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_nobody_there_and_what_is_no_http_are_told_of() -> None:
    def answer(handler: Any, number: int) -> None:
        handler.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n")

    with pytest.raises(PostError, match=r"^Connection refused$"):
        post(Receiver.parse(f"http://127.0.0.1:{closed_port()}/", SECRET), END, 60)
    with receiver(answer) as inbox, pytest.raises(PostError, match=r"^no HTTP \(BadStatusLine\)$"):
        post(Receiver.parse(inbox.url, SECRET), END, 60)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimulatedClock:
    clock = SimulatedClock()
    clock.rule(monkeypatch)
    return clock


def test_a_receiver_that_hangs_is_waited_for_within_the_bound(
    clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[float] = []

    def post_in_vain(receiver: Receiver, message: WebhookMessage, seconds: float) -> None:
        tries.append(seconds)
        clock.now += seconds
        raise PostError("no answer within 5.0 s")

    monkeypatch.setattr(sending, "post", post_in_vain)
    target, started = Receiver.parse("http://127.0.0.1:9/", SECRET), clock.now
    sender = WebhookSender(target)
    sender.finish(END, 12)
    assert tries == pytest.approx([5.0, 5.0, 1.9])  # no attempt takes all the time
    assert clock.now - started == pytest.approx(12)
    assert sender.failure == "no answer within 5.0 s"
    assert target.patience == pytest.approx(PATIENCE_SECONDS - 12)


def test_nobody_there_costs_the_bound_and_the_next_ends_of_the_same_command_less(
    clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def post_in_vain(receiver: Receiver, message: WebhookMessage, seconds: float) -> None:
        raise PostError("Connection refused")

    monkeypatch.setattr(sending, "post", post_in_vain)
    target, waited = Receiver.parse("http://127.0.0.1:9/", SECRET), []
    target.patience = 1.5
    for _ in range(2):
        sender, started = WebhookSender(target), clock.now
        sender.finish(END, 60)
        waited.append(clock.now - started)
        assert sender.failure == "Connection refused"
    assert waited == pytest.approx([1.5, sending.LEAST_SECONDS])


def test_a_last_message_overtakes_those_that_wait_for_a_server_in_trouble() -> None:
    def answer(handler: Any, number: int) -> None:
        is_last = handler.headers["webhook-id"] == END.id
        if not is_last:
            handler.inbox.closing.wait(0.02)
        status(200 if is_last else 503)(handler, 1)

    with receiver(answer) as inbox:
        sender = WebhookSender(Receiver.parse(inbox.url, SECRET))
        for number in range(50):
            sender.put(WebhookMessage("job.ended", {"number": number}))
        inbox.wait_for(2)  # the first job's message is still being retried
        sender.finish(END, 60)
        told = list(dict.fromkeys(request.headers["webhook-id"] for request in inbox.requests))
    assert len(told) == 51
    assert told.index(END.id) == 1
    assert sender.failure == "it answered 503"


def test_what_a_slow_receiver_does_not_take_in_time_is_told_of() -> None:
    def answer(handler: Any, number: int) -> None:
        handler.inbox.closing.wait(0.5)
        status(200)(handler, 1)

    with receiver(answer) as inbox:
        sender = WebhookSender(Receiver.parse(inbox.url, SECRET))
        for number in range(50):
            sender.put(WebhookMessage("job.ended", {"number": number}))
        sender.finish(END, 5.0)  # all of it would take 25
        assert END.id in {request.headers["webhook-id"] for request in inbox.requests}
    # depends on the machine's load
    ways = r"it was too slow for the last \d+|no answer within 0\.\d s|it took no message.*"
    assert re.fullmatch(ways, sender.failure)


def test_nobody_who_puts_a_message_waits_and_there_is_a_bound_to_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "MAX_WAITING_MESSAGES", 20)
    with receiver(silence) as inbox:
        sender = WebhookSender(Receiver.parse(inbox.url, SECRET))
        for number in range(100):
            sender.put(WebhookMessage("job.ended", {"number": number}))
        assert sender.failure == "more than 20 messages wait"
