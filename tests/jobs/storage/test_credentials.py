"""No error speaks of the credentials in a URI."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from urllib.parse import quote

import pytest
from click.testing import CliRunner

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.run.output_line import error_line
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.storage.folder_uri import hidden_credentials, shown_uri
from swiftbatch.jobs.storage.local_folder import LocalFolder
from swiftbatch.jobs.storage.retries import NO_RETRIES
from swiftbatch.jobs.storage.store import Store, StoreError
from swiftbatch.scheduler.cli import main
from tests import ROOT
from tests.jobs.checkpoints.checkpoint_parts import claim
from tests.jobs.run.run_parts import MANIFEST, PROGRESS, make_record
from tests.jobs.storage.s3_server import ACCESS_KEY, SECRET_KEY, S3Server

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
        "import sys; from swiftbatch.jobs.storage.retries import NO_RETRIES\n"
        "from swiftbatch.jobs.storage.store import Store, StoreError\n"
        "try: Store(sys.argv[1], NO_RETRIES).write('a', b'x')\n"
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

    store = Store(uri, NO_RETRIES)
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


def test_no_credentials_of_the_environment_are_in_an_error(s3_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Telling(LocalFolder):
        def read(self, path: str) -> bytes | None:
            raise OSError(f"the key {ACCESS_KEY} with {SECRET_KEY} and session-token is not known")

    monkeypatch.setenv("AWS_SESSION_TOKEN", "session-token")
    store = Store(s3_uri, NO_RETRIES)
    store._folder = Telling("/nowhere")
    with pytest.raises(StoreError, match=r"the key \*\*\* with \*\*\* and \*\*\* is not known"):
        store.read("a")


@pytest.mark.parametrize("is_in_uri", [True, False])
def test_no_file_of_a_run_and_no_output_holds_credentials(
    s3_server: S3Server, s3_uri: str, is_in_uri: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    uri = s3_uri
    if is_in_uri:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
            monkeypatch.delenv(name)
        bucket = s3_uri.removeprefix("s3://")
        uri = (
            f"s3://{ACCESS_KEY}:{quote(SECRET_KEY, safe='')}@{bucket}?scheme=http&endpoint_override={s3_server.address}"
        )
    run = Run.planned(uri, MANIFEST).made()
    record = make_record("a")
    run.add_jobs([record])
    run.write_progress(PROGRESS)
    run.request_cancel(None)
    run.write_error(record.job_id, error_line(record, "attempts_exhausted", "worker lost"))
    checkpoints = CheckpointStore.of(run)
    attempt = claim(checkpoints, record.job_id, "worker-1")
    run.store.write(f"checkpoints/{record.job_id}/{attempt:04d}/tokens.bin", b"torn")
    assert len(checkpoints.read_log(record.job_id).token_ids) == 0
    run.write_output()
    seen = caplog.text
    for command in (["status"], ["status", "--json"], ["results"], ["cancel"]):
        done = CliRunner().invoke(main, [command[0], uri, *command[1:]])
        assert done.exit_code == 0
        seen += done.output
    for option in (["--seed", "5"], ["--dtype", "float32"], ["--model", "other"], ["--engine", "triforce"]):
        done = CliRunner().invoke(main, ["submit", str(__file__), "--run", uri, *option])
        assert done.exit_code == 2
        assert ("goes on with it" if option[0] == "--engine" else "was made with") in done.output
        seen += done.output
    assert "tokens.bin" in seen  # the warning of the damaged file
    assert "worker lost" in seen  # the output
    for path in all_files(run.store, ""):
        seen += run.store.read(path).decode("latin1")
    assert [secret for secret in (ACCESS_KEY, SECRET_KEY, quote(SECRET_KEY, safe="")) if secret in seen] == []


def all_files(store: Store, folder: str) -> Iterator[str]:
    for name in store.list(folder):
        path = f"{folder}/{name}" if folder else name
        if store.exists(path):
            yield path
        else:
            yield from all_files(store, path)
