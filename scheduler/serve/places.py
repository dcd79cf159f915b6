"""Hides a server's places from its clients: texts for them name places below the folder of runs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape

from swiftbatch.jobs.storage.store import Store

RUNS = "the folder of runs"


class Places:
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
