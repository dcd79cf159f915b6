"""No error speaks of the credentials in a URI."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from jobs.folders import LocalFolder
from jobs.store import Store, StoreError
from jobs.uris import hidden_credentials, shown_uri

ROOT = Path(__file__).parent.parent


URIS = [
    "s3://KEYID:s3cr%2Ft@bucket/run?endpoint_override=localhost:1",
    "s3://KEYID:s3cr/t@bucket/run",
    "s3://bucket/run?access_key=KEYID&secret_key=s3cr%2Ft",
    "s3://KEYID:s3cr/t",
]


@pytest.mark.parametrize("uri", URIS)
def test_credentials_are_not_shown(uri: str) -> None:
    for text in (shown_uri(uri), hidden_credentials(f"bad URI {uri}: no s3cr/t for KEYID", uri)):
        assert "KEYID" not in text
        assert "s3cr" not in text
    assert shown_uri(uri) in ("s3://bucket/run", "s3://***")


def test_an_object_store_that_does_not_answer_is_one_line_without_credentials() -> None:
    program = (
        "import sys; from jobs.store import Store, StoreError\n"
        "try: Store(sys.argv[1]).write('a', b'x')\n"
        "except StoreError as error: print(error)"
    )
    uri = "s3://KEYID:s3cr%2Ft@bucket/run?endpoint_override=127.0.0.1:9&scheme=http&region=us-east-1"
    command = [sys.executable, "-c", program, uri]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert "cannot write 'a' in s3://bucket/run: " in done.stdout
    assert done.stdout.count("\n") == 1
    assert "KEYID" not in done.stdout + done.stderr
    assert "s3cr" not in done.stdout + done.stderr


def test_an_error_of_the_storage_that_speaks_of_credentials_is_shown_without_them() -> None:
    uri = "s3://KEYID:s3cr%2Ft@bucket/run?region=us-east-1"

    class Refusing(LocalFolder):
        def read(self, path: str) -> bytes | None:
            raise OSError(f"bad key KEYID\nwith s3cr/t in {uri}")

    store = Store(uri)
    store._folder = Refusing("/nowhere")
    with pytest.raises(StoreError) as reading:
        store.read("a")
    with pytest.raises(StoreError) as opening:
        Store(f"{uri}&bogus=1")
    for caught in (reading, opening):
        assert "s3://bucket/run" in str(caught.value)
        assert [secret for secret in ("KEYID", "s3cr", "\n") if secret in str(caught.value)] == []
        assert caught.value.__suppress_context__


def test_an_at_sign_in_a_prefix_is_shown() -> None:
    assert shown_uri("s3://bucket/a@b") == "s3://bucket/a@b"
    assert shown_uri("s3://key:secret@bucket/a@b") == "s3://bucket/a@b"
