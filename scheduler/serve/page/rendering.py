"""Renders templates with all texts escaped, direction marks included."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from swiftbatch.metrics.report.page_text import date, in_html
from swiftbatch.scheduler.display.progress_line import counted, duration, printable

FOLDER = Path(__file__).parent
LONGEST_NAME = 120  # characters shown of a batch's name
SPANS = ((86400, "d"), (3600, "h"), (60, "min"))


def page_response(template: str, values: Mapping[str, Any], status: int = 200) -> HTMLResponse:
    page = ENVIRONMENT.get_template(f"{template}.html.jinja").render(values)
    return HTMLResponse(page.encode(errors="replace"), status)


def number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def ago(moment: float) -> str:
    """Return the age of a time in its largest unit."""
    seconds = max(0.0, time.time() - moment)
    for length, unit in SPANS:
        if seconds >= length:
            return f"{int(seconds / length)} {unit} ago"
    return f"{int(seconds)} s ago"


def plain(text: str) -> str:
    """Escape control characters and direction marks."""
    return printable(text)


def short(text: str) -> str:
    return plain(text if len(text) <= LONGEST_NAME else f"{text[:LONGEST_NAME]}…")


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        finalize=in_html,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    filters = (number, ago, plain, short, date, duration, counted)
    environment.filters |= {each.__name__: each for each in filters}
    return environment


ENVIRONMENT = _environment()
