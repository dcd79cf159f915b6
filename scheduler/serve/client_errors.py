"""The errors that tell a client what it did wrong, as OpenAI's API says it, and what no text for a client may say.

Texts for clients name places below the folder of runs, and not where the server has that.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.storage.store import Store

RUNS = "the folder of runs"


class RefusedError(UserError):
    """A request that is not done: its HTTP status, the parameter that is at fault, and a word for programs."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    @property
    def kind(self) -> str:
        """The error's `type`."""
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
    """Takes the places of one server out of texts, also out of JSON and HTML."""

    def __init__(self, runs: Store, words: Iterable[str]) -> None:
        """`words` are those of the command line: of a path among them its last name stays."""
        shown = {uri.rstrip("/") for uri in (runs.uri, runs.shown_uri) if "/" in uri}
        names = dict.fromkeys(shown, RUNS) | {f"{uri}/": "" for uri in shown}
        names |= {
            word: word.rstrip("/").rpartition("/")[2] for word in words if word.startswith("/") and word.strip("/")
        }
        forms = {form(place): name for place, name in names.items() for form in (str, _in_json, escape)}
        self._names = sorted(forms.items(), key=lambda each: len(each[0]), reverse=True)

    def hidden(self, text: str) -> str:
        """The text as clients may read it."""
        for place, name in self._names:
            text = text.replace(place, name)
        return text


def _in_json(text: str) -> str:
    return json.dumps(text)[1:-1]
