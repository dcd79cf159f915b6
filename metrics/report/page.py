"""The page: everything that the template shows, and the template filled in."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from swiftbatch.jobs.storage.store import Store
from swiftbatch.metrics.report.curves import (
    acceptance_by_length,
    length_chart,
    ms_per_token_by_length,
    throughput,
    throughput_chart,
)
from swiftbatch.metrics.report.gantt import attempt_line, gantt
from swiftbatch.metrics.report.intervals import Stretches, job_pace
from swiftbatch.metrics.report.job_facts import JobFacts
from swiftbatch.metrics.report.page_text import clock, date, in_html, ticks
from swiftbatch.metrics.report.run_facts import RunFacts
from swiftbatch.metrics.report.summary import summary

FOLDER = Path(__file__).parent
MAX_REJECTS = 1000
NUM_GANTT_TICKS = 6
MAX_TICK_PERCENT = 94
PATH_CHARACTERS = b"/"  # characters that stay as they are in a link


def render(facts: RunFacts, store: Store, folder: str | None) -> str:
    """The page as HTML. On a local disk its links lead from `folder`, where the page will lie, to the run's files.

    None is for a page without links.
    """
    found = facts.tally.stretches()
    begin, end = _span(facts, found)
    rows = [_row(job, begin, store, folder) for job in facts.jobs]
    template = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        finalize=in_html,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template("page.html.jinja")
    return template.render(
        facts=facts,
        summary=summary(facts, found, begin, end),
        started=date(begin),
        updated=date(facts.progress.updated),
        css=(FOLDER / "style.css").read_text(encoding="utf-8"),
        gantt=gantt(facts, begin, end),
        ticks=_gantt_ticks(end - begin),
        rows=rows,
        problems=[row for row in rows if row["job"].state == "failed"],
        rejects=facts.rejects[:MAX_REJECTS],
        num_jobs=facts.tally.num_jobs,
        is_measured=found.is_measured or len(found.start) == 0,
        **_charts(facts, found, begin, end),
    )


def _charts(facts: RunFacts, found: Stretches, begin: float, end: float) -> dict[str, Any]:
    """The three curves as SVG, None where there is nothing to draw."""
    losses = sorted(end - begin for end in facts.tally.losses)
    acceptance, pace = acceptance_by_length(found), ms_per_token_by_length(found)
    return {
        "throughput": throughput_chart(throughput(found, begin, end), losses) if len(found.start) else None,
        "acceptance": acceptance and length_chart(acceptance, "Mean acceptance length over length", from_zero=False),
        "pace": pace and length_chart(pace, "Milliseconds per token over length", from_zero=True),
    }


def _span(facts: RunFacts, found: Stretches) -> tuple[float, float]:
    """The start of the first attempt and the end of the last, in seconds since the epoch."""
    tally = facts.tally
    if not tally.starts:
        return facts.progress.started, facts.progress.started
    last = max(tally.ends)
    return min(tally.starts), float(found.end.max(initial=last))


def _gantt_ticks(seconds: float) -> list[tuple[float, str]]:
    """The ticks of the plan's time axis, in percent; a label at the very end would stick out."""
    places = ((100 * moment / max(seconds, 1e-9), label) for moment, label in ticks(seconds, NUM_GANTT_TICKS))
    return [(place, label) for place, label in places if place <= MAX_TICK_PERCENT]


def _row(job: JobFacts, begin: float, store: Store, folder: str | None) -> dict[str, Any]:
    resumes = Counter(attempt.resume.kind for attempt in job.attempts if attempt.resume is not None)
    acceptance, pace = job_pace(job)
    return {
        "number": job.number,
        "job": job,
        "prompt": job.prompt,
        "resumes": ", ".join(f"{count} {kind}" for kind, count in sorted(resumes.items())),
        "attempts": [attempt_line(attempt, begin) for attempt in job.attempts],
        "seconds": clock(job.attempts[-1].end - job.attempts[0].start) if job.attempts else "",
        "acceptance": "" if acceptance is None else f"{acceptance:.2f}",
        "pace": "" if pace is None else f"{pace:,.1f}",
        "file": job.file,
        "link": None if job.file is None else _link(store, job.file, folder),
    }


def _link(store: Store, file: str, folder: str | None) -> str | None:
    """A relative link to a file of the run; None where no browser could follow it."""
    if folder is None or not store.is_local:
        return None
    path = os.path.relpath(os.path.join(store.uri, file), folder)
    return quote(os.fsencode(path), safe=PATH_CHARACTERS)
