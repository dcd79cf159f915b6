"""Texts, durations, dates and axis ticks for pages."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from markupsafe import Markup

NOT_HTML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def in_html(value: object) -> object:
    """Escape control characters and lone surrogates, which HTML can't hold."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return NOT_HTML.sub(lambda found: found[0].encode("unicode_escape").decode(), value)


MINUTE, HOUR, DAY = 60, 3600, 86_400
STEPS = (
    *(1, 2, 5, 10, 15, 30),
    *(minutes * MINUTE for minutes in (1, 2, 5, 10, 15, 30)),
    *(hours * HOUR for hours in (1, 2, 3, 6, 12)),
    *(days * DAY for days in (1, 2, 7, 14, 30)),
)


def ticks(seconds: float, most: int) -> list[tuple[float, str]]:
    """Return at most `most` + 1 round times with labels."""
    step = next((step for step in STEPS if seconds / step <= most), STEPS[-1])
    return [(float(moment), clock(moment)) for moment in range(0, int(seconds) + 1, step)]


def clock(seconds: float) -> str:
    """Return elapsed time as 0:07, 12:30, 1:02:03 or 2d 05:00."""
    total = round(seconds)
    days, rest = divmod(total, DAY)
    if days:
        return f"{days}d {rest // HOUR:02}:{rest % HOUR // MINUTE:02}"
    if total >= HOUR:
        return str(timedelta(seconds=total))
    return f"{total // MINUTE}:{total % MINUTE:02}"


def amount(cost: float) -> str:
    """Return a sum of money without its currency: two decimals, below 1 up to six."""
    return f"{cost:,.2f}" if cost >= 1 else f"{cost:.6f}".rstrip("0").rstrip(".")


def date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
