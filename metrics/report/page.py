"""The page of a report: the template's values, and rendering."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from swiftbatch.jobs.storage.store import Store
from swiftbatch.metrics.counters import MEMORY_FULL
from swiftbatch.metrics.report.attempts import Intervals, JobFacts, job_pace
from swiftbatch.metrics.report.charts import (
    acceptance_by_length,
    attempt_line,
    gantt,
    length_chart,
    ms_per_token_by_length,
    throughput,
    throughput_chart,
)
from swiftbatch.metrics.report.page_text import amount, clock, date, in_html, ticks
from swiftbatch.metrics.report.run_facts import RunFacts


@dataclass(frozen=True)
class Figure:
    """A named value; `link` leads to a part of the page, `tone` is a CSS class."""

    name: str
    value: str
    detail: str = ""
    link: str = ""
    tone: str = ""


def summary(facts: RunFacts, found: Intervals, begin: float, end: float) -> list[Figure]:
    """Return a run's figures between two times in seconds since the epoch."""
    return [
        _jobs(facts),
        _tokens(facts),
        _speed(facts, found, begin, end),
        _acceptance(facts, found),
        _preemptions(facts),
        _problems(facts),
        *_cost(facts),
    ]


def _jobs(facts: RunFacts) -> Figure:
    states = facts.tally.states
    others = ", ".join(f"{count} {state}" for state, count in states.items() if state != "finished")
    return Figure(
        "jobs finished", f"{states['finished']:,} of {facts.tally.num_jobs:,}", others or "all of them", "#jobs"
    )


def _tokens(facts: RunFacts) -> Figure:
    tally = facts.tally
    return Figure("tokens generated", f"{tally.num_tokens:,}", f"{tally.num_prompt_tokens:,} of prompts")


def _speed(facts: RunFacts, found: Intervals, begin: float, end: float) -> Figure:
    active = facts.tally.covered_seconds()
    speed = f"{found.num_tokens.sum() / active:,.0f} tokens/s" if active > 0 else "none yet"
    details = [_counted(len(facts.tally.workers), "worker")]
    if facts.num_drivers > 1:
        details.append(_counted(facts.num_drivers, "driver"))
    if (idle := end - begin - active) > 1:
        details.append(f"{clock(idle)} without a job not counted")
    took = clock(end - begin) if end - begin >= 10 else f"{end - begin:.1f} s"
    return Figure(f"on average, in {took}", speed, ", ".join(details), "#speed")


def _acceptance(facts: RunFacts, found: Intervals) -> Figure:
    drafts = found.num_drafts.sum()
    if drafts == 0:
        return Figure("mean acceptance length", "1", "plain decoding: nothing was drafted")
    length = 1 + found.num_accepted_tokens.sum() / drafts
    detail = ", ".join(["tokens per drafted step", *_shares_of_drafts(facts)])
    return Figure("mean acceptance length", f"{length:.2f}", detail, "#length")


def _shares_of_drafts(facts: RunFacts) -> list[str]:
    """Return which shares of the tokens came from chains, trees and plain steps."""
    words = ("chains", "trees", "plain steps")  # in the order of `DRAFTS`
    counts = facts.tally.num_tokens_by_draft.values()
    return [f"{count / sum(counts):.0%} by {word}" for word, count in zip(words, counts, strict=True) if count]


def _preemptions(facts: RunFacts) -> Figure:
    outcomes = facts.tally.outcomes
    kept, drawn = facts.tally.num_recovered_tokens, facts.tally.num_recomputed_tokens
    detail = f"{outcomes['lost']} lost, {outcomes['released']} handed back; "
    detail += f"{kept:,} tokens recovered, {drawn:,} drawn again"
    if num_evicted := facts.progress.num_preemptions.get(MEMORY_FULL, 0):
        detail += f"; {num_evicted:,} for want of memory in the last driver's time"
    num_preemptions = outcomes["lost"] + outcomes["released"]
    return Figure("preemptions", f"{num_preemptions:,}", detail if num_preemptions else "none", "#workers")


def _problems(facts: RunFacts) -> Figure:
    failed = facts.tally.states["failed"]
    rejected = f"{_counted(len(facts.rejects), 'line')} of the job file rejected"
    tone = "bad" if failed else "" if facts.rejects else "good"
    return Figure("dead-letters", f"{failed:,}", rejected, "#problems", tone)


def _cost(facts: RunFacts) -> list[Figure]:
    """Return what the run costs, if it has a price."""
    cost, per_token = facts.progress.cost, facts.progress.cost_per_token
    if cost is None:
        return []
    detail = f"{facts.progress.worker_seconds / 3600:,.4g} worker hours"
    if per_token is not None:
        detail += f"; {amount(per_token * 1e6)} per million tokens"
    return [Figure("cost", amount(cost), detail, "#jobs")]


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


FOLDER = Path(__file__).parent
MAX_REJECTS = 1000
NUM_GANTT_TICKS = 6
MAX_TICK_PERCENT = 94
PATH_CHARACTERS = b"/"  # left unquoted in a link


def render(facts: RunFacts, store: Store, folder: str | None) -> str:
    """Render the page as HTML; links are relative to `folder`, and omitted if it is None."""
    found = facts.tally.stretches()
    begin, end = _span(facts, found)
    per_token = facts.progress.cost_per_token or 0.0
    rows = [_row(job, begin, store, folder) | {"cost": amount(job.num_tokens * per_token)} for job in facts.jobs]
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
        **_charts(facts, found, begin, end),
    )


def _charts(facts: RunFacts, found: Intervals, begin: float, end: float) -> dict[str, Any]:
    losses = sorted(end - begin for end in facts.tally.losses)
    acceptance, pace = acceptance_by_length(found), ms_per_token_by_length(found)
    return {
        "throughput": throughput_chart(throughput(found, begin, end), losses) if len(found.start) else None,
        "acceptance": acceptance and length_chart(acceptance, "Mean acceptance length over length", from_zero=False),
        "pace": pace and length_chart(pace, "Milliseconds per token over length", from_zero=True),
    }


def _span(facts: RunFacts, found: Intervals) -> tuple[float, float]:
    tally = facts.tally
    if not tally.starts:
        return facts.progress.started, facts.progress.started
    last = max(tally.ends)
    return min(tally.starts), float(found.end.max(initial=last))


def _gantt_ticks(seconds: float) -> list[tuple[float, str]]:
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
    """Return the link to a file, or None if no browser could open the file."""
    if folder is None or not store.is_local:
        return None
    path = os.path.relpath(os.path.join(store.uri, file), folder)
    return quote(os.fsencode(path), safe=PATH_CHARACTERS)
