"""What a URI and the environment say of an object store is what the connection takes: place, keys, endpoint, region."""

from __future__ import annotations

import urllib.request
from typing import Any

import pytest
from obstore.store import AzureStore, GCSStore, S3Store

from swiftbatch.jobs.storage import object_store
from swiftbatch.jobs.storage.object_store import connections
from swiftbatch.jobs.storage.store import Store, StoreError
from tests.jobs.storage.s3_server import ACCESS_KEY, SECRET_KEY, S3Server

NO_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


def keys_of(uri: str) -> dict[str, Any] | None:
    """The keys with which requests of a connection are signed, without their time; None where they aren't signed."""
    provider = connections(uri)(1).credential_provider
    return None if provider is None else {name: key for name, key in provider().items() if name != "expires_at"}


@pytest.mark.usefixtures("s3_uri")
def test_keys_come_from_the_uri_or_else_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token")
    of_environment = {"access_key_id": ACCESS_KEY, "secret_access_key": SECRET_KEY, "token": "token"}
    assert keys_of("s3://bucket/run") == of_environment
    of_uri = {"access_key_id": "ID", "secret_access_key": "a/b", "token": None}
    assert keys_of("s3://ID:a%2Fb@bucket/run") == of_uri
    assert keys_of("s3://bucket/run?access_key=ID&secret_key=a%2Fb") == of_uri


def test_without_any_keys_requests_are_not_signed(s3_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NO_KEYS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    assert keys_of(s3_uri) is None
    assert connections(s3_uri)(1).config["skip_signature"] == "true"


def test_a_profile_that_is_not_there_is_one_line(s3_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NO_KEYS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(StoreError, match=r"cannot use s3://.* as a folder: .*profile \(nobody\) could not be found"):
        Store(s3_uri)


def test_the_region_of_amazons_bucket_is_asked_for_and_that_of_others_is_told(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    assert connections("s3://far-away/run")(1).config["region"] == "us-east-1"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "")  # which counts as absent
    monkeypatch.setattr(object_store, "AMAZON", s3_server.url)
    place = b"<CreateBucketConfiguration><LocationConstraint>eu-west-3</LocationConstraint></CreateBucketConfiguration>"
    kind = {"Content-Type": "application/xml"}
    request = urllib.request.Request(f"{s3_server.url}/far-away", place, kind, method="PUT")
    urllib.request.urlopen(request, timeout=60).close()
    config = connections("s3://far-away/run")(1).config
    assert (config["region"], config["endpoint_url_s3"]) == ("eu-west-3", "https://s3.eu-west-3.amazonaws.com")
    monkeypatch.setattr(object_store, "AMAZON", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_REGION", "cn-north-1")
    config = connections("s3://far-away/run")(1).config
    assert config["endpoint_url_s3"] == "https://s3.cn-north-1.amazonaws.com.cn"
    assert connections("s3://far-away/run?region=eu-north-1")(1).config["region"] == "eu-north-1"


def test_a_place_of_google_or_azure_is_what_the_uri_says(monkeypatch: pytest.MonkeyPatch) -> None:
    google = connections("gs://anonymous@bucket/my%20runs/a/?scheme=http&endpoint_override=localhost:4443")(1)
    assert isinstance(google, GCSStore)
    expected = {"bucket": "bucket", "skip_signature": "true", "base_url": "http://localhost:4443"}
    assert (google.prefix, google.config) == ("my runs/a", expected)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "ours")
    azure = connections("az://container/runs")(1)
    assert isinstance(azure, AzureStore)
    assert (azure.prefix, azure.config["container_name"]) == ("runs", "container")


@pytest.mark.usefixtures("s3_uri")
def test_a_place_of_s3_is_what_the_uri_says() -> None:
    store = connections("s3://bucket/my%20runs/a/?virtual_hosted_style_request=true")(1)
    assert isinstance(store, S3Store)
    assert (store.prefix, store.config["bucket"]) == ("my runs/a", "bucket")
    assert store.config["virtual_hosted_style_request"] == "true"


@pytest.mark.parametrize("uri", ["s3://bucket/run?bogus=1", "gs://bucket/run?bogus=1", "az://container/run?bogus=1"])
@pytest.mark.usefixtures("s3_uri")
def test_a_setting_that_nobody_knows_is_one_line(uri: str) -> None:
    with pytest.raises(StoreError, match=r"cannot use .* as a folder: Configuration key: 'bogus' is not valid"):
        Store(uri)


def test_an_azure_container_without_an_account_is_one_line() -> None:
    with pytest.raises(StoreError, match=r"cannot use az://container/run as a folder: .*Account must be specified"):
        Store("az://container/run")
