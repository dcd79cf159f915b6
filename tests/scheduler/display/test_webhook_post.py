from __future__ import annotations

import pytest

from swiftbatch.scheduler.display.webhooks import Receiver, ReceiverError
from tests.scheduler.display.receivers import KEY, SECRET


def test_an_address_is_shown_without_what_may_be_secret_in_it() -> None:
    receiver = Receiver.parse("https://hooks.example.org:8443/services/T0/SECRETPATH?token=SECRET#part", SECRET)
    assert (receiver.host, receiver.url.port, receiver.is_encrypted) == ("hooks.example.org", 8443, True)
    assert receiver.target == "/services/T0/SECRETPATH?token=SECRET"
    assert str(receiver) == "https://hooks.example.org:8443"
    assert "SECRET" not in repr(receiver)
    assert receiver.key == KEY
    assert str(KEY) not in repr(receiver)
    plain = Receiver.parse("http://[::1]:80", None)
    assert (plain.host, plain.target, plain.key) == ("::1", "/", None)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("", "characters that no address has"),
        ("https://host/a b", "characters that no address has"),
        ("https://host/a\r\nX-Evil: 1", "characters that no address has"),
        ("https://höst/SECRET", "characters that no address has"),
        ("ftp://host/SECRET", "does not begin with http:// or https://"),
        ("file:///SECRET", "does not begin with http:// or https://"),
        ("host/SECRET", "does not begin with http:// or https://"),
        ("https://", "does not begin with http:// or https:// and a host"),
        ("https://user:SECRET@host/", "a user or a password in the address"),
        ("https://SECRET@host/", "a user or a password in the address"),
        ("https://host:99999/SECRET", "a wrong address"),
        ("https://[::1/SECRET", "a wrong address"),
    ],
)
def test_other_addresses_are_refused_without_being_shown(url: str, problem: str) -> None:
    with pytest.raises(ReceiverError, match=problem) as caught:
        Receiver.parse(url, None)
    assert "SECRET" not in str(caught.value).replace("SWIFTBATCH_WEBHOOK_SECRET", "")


@pytest.mark.parametrize(
    "secret", ["", "whsec_", "whsec_c2hvcnQ=", "my password", f"{SECRET}!", "whsec_" + "AAAA" * 22]
)
def test_a_secret_that_is_none_is_refused_with_how_to_make_one_and_not_shown(secret: str) -> None:
    with pytest.raises(
        ReceiverError, match=r"SWIFTBATCH_WEBHOOK_SECRET: found no secret.*openssl rand -base64"
    ) as caught:
        Receiver.parse("https://host/", secret)
    assert len(secret) < 7 or secret not in str(caught.value)
