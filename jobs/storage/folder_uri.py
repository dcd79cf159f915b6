"""The URI of a folder: its local path, and its form without credentials."""

from __future__ import annotations

import os
from urllib.parse import unquote, urlsplit

OBJECT_STORES = ("s3", "gs", "az")
S3_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
SECRET_VARIABLES = (*S3_KEYS, "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_CLIENT_SECRET")
PLAIN_SETTINGS = ("scheme", "endpoint_override", "region")
EXPECTED = "expected a path, or a URI that starts with file://, s3://, gs:// or az://"


def local_path(uri: str) -> str | None:
    """Return the absolute path of a local folder, or None for an object store.

    Raises `ValueError` for another scheme, or an object store without a bucket.
    """
    if not uri or "\0" in uri:
        raise ValueError(EXPECTED)
    if "://" not in uri:
        return os.path.abspath(uri)
    parts = urlsplit(uri)
    if parts.scheme in OBJECT_STORES:
        bucket = parts.netloc.rpartition("@")[2]
        if not bucket or ":" in bucket:
            raise ValueError(f"expected a bucket, as in {parts.scheme}://bucket/runs/my-run")
        return None
    if parts.scheme != "file":
        raise ValueError(EXPECTED)
    if parts.netloc or not parts.path.startswith("/"):
        raise ValueError("expected three slashes and an absolute path, as in file:///home/me/run")
    return os.path.abspath(unquote(parts.path))


def shown_uri(uri: str) -> str:
    """Return the URI without user, password and query, which may hold credentials."""
    if "://" not in uri:
        return uri or "''"
    scheme, rest = uri.split("://", 1)
    return f"{scheme}://{_split_user_info(rest.partition('?')[0])[1]}"


def hidden_credentials(text: str, uri: str) -> str:
    """Return `text` without the secrets of `uri` and of the environment."""
    secrets = _secrets(uri) | {os.environ[name] for name in SECRET_VARIABLES if os.environ.get(name)}
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def _secrets(uri: str) -> set[str]:
    if "://" not in uri:
        return set()
    place, _, query = uri.split("://", 1)[1].partition("?")
    settings = [pair.partition("=") for pair in query.split("&")]
    values = [value for name, _, value in settings if name not in PLAIN_SETTINGS]
    values += _split_user_info(place)[0].split(":", 1)
    return {form for value in values if value for form in (value, unquote(value))}


def _split_user_info(place: str) -> tuple[str, str]:
    """Split off user information. An unquoted password may contain '@'; any other '@' belongs to the prefix."""
    head, slash, prefix = place.partition("/")
    if "@" in head or ":" not in head:
        user_info, _, bucket = head.rpartition("@")
        return user_info, bucket + slash + prefix
    user_info, _, rest = place.rpartition("@")
    return user_info or head, rest if user_info else "***"
