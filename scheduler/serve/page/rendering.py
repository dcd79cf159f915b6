"""Templates filled in. Whatever a text holds, it stays a text: all is escaped, and nothing steers the reader's eye."""

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
LONGEST_NAME = 120  # characters that are shown of a batch's name
SPANS = ((86400, "d"), (3600, "h"), (60, "min"))


def page_response(template: str, values: Mapping[str, Any], status: int = 200) -> HTMLResponse:
    """A page made of a template and what it shows."""
    page = ENVIRONMENT.get_template(f"{template}.html.jinja").render(values)
    return HTMLResponse(page.encode(errors="replace"), status)


def number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"


def ago(moment: float) -> str:
    """Tell how long ago a moment since the epoch is, in its largest unit."""
    seconds = max(0.0, time.time() - moment)
    for length, unit in SPANS:
        if seconds >= length:
            return f"{int(seconds / length)} {unit} ago"
    return f"{int(seconds)} s ago"


def plain(text: str) -> str:
    """A user's word on one line: marks that turn its direction become escapes, as control characters do."""
    return printable(text)


def short(text: str) -> str:
    """The text that `plain` makes, cut if it is too long."""
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
