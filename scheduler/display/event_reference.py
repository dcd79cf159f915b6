"""Writes `scheduler/display/EVENTS.md`, the list of all `--json` events, from their classes."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path

from swiftbatch.jobs.run.run_records import Progress
from swiftbatch.scheduler.display import events
from swiftbatch.scheduler.display.events import Event

PATH = Path(__file__).with_name("EVENTS.md")
HEAD = """\
# Events of `--json`

`swiftbatch submit`, `resume`, `extend` and `status --watch` print one JSON object a line with `--json`: `event` is its
kind, `time` is when it was told, in seconds since the epoch. Other fields depend on the kind. New kinds and fields may
come, so skip those that you do not know. A command that has to stop ends without `run_ended`: exit code 2, a line on
stderr.

`custom_id` is that of the input line; each of several choices of a line is a job of its own, and called
`custom_id[0]`, `custom_id[1]` and so on.

`python -m swiftbatch.scheduler.display.event_reference` writes this file.

| event | fields | what has happened |
|---|---|---|
"""


def kinds() -> list[type[Event]]:
    found = [value for value in vars(events).values() if inspect.isclass(value)]
    return [kind for kind in found if issubclass(kind, Event) and kind is not Event]


def reference() -> str:
    rows = [_row(kind.kind(), [field.name for field in fields(kind)], kind.__doc__ or "") for kind in kinds()]
    rows.append(_row("progress", list(Progress.model_fields), f"Every few seconds. {Progress.__doc__}"))
    return HEAD + "".join(rows)


def _row(kind: str, names: list[str], text: str) -> str:
    return f"| `{kind}` | {', '.join(f'`{name}`' for name in names)} | {' '.join(text.split())} |\n"


if __name__ == "__main__":
    PATH.write_text(reference(), encoding="utf-8")
