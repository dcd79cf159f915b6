"""Client errors in OpenAI's form, and removal of the server's paths from texts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.storage.store import Store

RUNS = "the folder of runs"


class RefusedError(UserError):
    """A refused request: HTTP status, parameter and error code."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    @property
    def kind(self) -> str:
        return "server_error" if self.status >= 500 else "invalid_request_error"


def no_such_file(file_id: str, param: str = "id") -> RefusedError:
    return RefusedError(f"No such File object: {file_id[:80]}", 404, param)


def no_such_batch(batch_id: str) -> RefusedError:
    return RefusedError(f"No batch found with id '{batch_id[:80]}'.", 404, "batch_id")


def other_request(key: str) -> RefusedError:
    return RefusedError(
        f"Idempotency-Key: {key[:80]!a} came with another request before; expected the same request, or another key",
        422,
        "Idempotency-Key",
        "idempotency_key_reused",
    )


class PathRedactor:
    """Removes a server's paths from texts, also inside JSON and HTML."""

    def __init__(self, runs: Store, words: Iterable[str]) -> None:
        """A path among the command line's `words` is cut to its last name."""
        shown = {uri.rstrip("/") for uri in (runs.uri, runs.shown_uri) if "/" in uri}
        names = dict.fromkeys(shown, RUNS) | {f"{uri}/": "" for uri in shown}
        names |= {
            word: word.rstrip("/").rpartition("/")[2] for word in words if word.startswith("/") and word.strip("/")
        }
        forms = {form(place): name for place, name in names.items() for form in (str, _in_json, escape)}
        self._names = sorted(forms.items(), key=lambda each: len(each[0]), reverse=True)

    def hidden(self, text: str) -> str:
        for place, name in self._names:
            text = text.replace(place, name)
        return text


def _in_json(text: str) -> str:
    return json.dumps(text)[1:-1]
