"""The few figures at the top of a report."""

from __future__ import annotations

from dataclasses import dataclass

from swiftbatch.metrics.driver_counters import OUTGROWN
from swiftbatch.metrics.report.intervals import Stretches
from swiftbatch.metrics.report.page_text import clock
from swiftbatch.metrics.report.run_facts import RunFacts


@dataclass(frozen=True)
class Figure:
    """A value with its name and a line of detail; `link` leads to a part of the page, `tone` is a CSS class."""

    name: str
    value: str
    detail: str = ""
    link: str = ""
    tone: str = ""


def summary(facts: RunFacts, found: Stretches, begin: float, end: float) -> list[Figure]:
    """The figures of a run between two times, in seconds since the epoch."""
    return [
        _jobs(facts),
        _tokens(facts),
        _speed(facts, found, begin, end),
        _acceptance(facts, found),
        _preemptions(facts),
        _problems(facts),
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


def _speed(facts: RunFacts, found: Stretches, begin: float, end: float) -> Figure:
    active = facts.tally.covered_seconds()
    speed = f"{found.num_tokens.sum() / active:,.0f} tokens/s" if active > 0 else "none yet"
    details = [_counted(len(facts.tally.workers), "worker")]
    if facts.num_drivers > 1:
        details.append(_counted(facts.num_drivers, "driver"))
    if (idle := end - begin - active) > 1:
        details.append(f"{clock(idle)} without a job not counted")
    return Figure(f"on average, in {clock(end - begin)}", speed, ", ".join(details), "#speed")


def _acceptance(facts: RunFacts, found: Stretches) -> Figure:
    drafts = found.num_drafts.sum()
    if drafts == 0:
        return Figure("mean acceptance length", "1", "plain decoding: nothing was drafted")
    length = 1 + found.num_accepted_tokens.sum() / drafts
    detail = ", ".join(["tokens per drafted step", *_shares_of_drafts(facts)])
    return Figure("mean acceptance length", f"{length:.2f}", detail, "#length")


def _shares_of_drafts(facts: RunFacts) -> list[str]:
    """The shares of the jobs' last attempts' tokens that came by chains, trees or plain steps; none if no job says."""
    words = ("chains", "trees", "plain steps")  # in the order of `DRAFTS`
    counts = facts.tally.num_tokens_by_draft.values()
    return [f"{count / sum(counts):.0%} by {word}" for word, count in zip(words, counts, strict=True) if count]


def _preemptions(facts: RunFacts) -> Figure:
    outcomes = facts.tally.outcomes
    kept, drawn = facts.tally.num_recovered_tokens, facts.tally.num_recomputed_tokens
    detail = f"{outcomes['lost']} lost, {outcomes['released']} handed back; "
    detail += f"{kept:,} tokens recovered, {drawn:,} drawn again"
    if num_outgrown := facts.progress.num_preemptions.get(OUTGROWN, 0):
        detail += f"; {num_outgrown:,} for want of memory in the last driver's time"
    num_preemptions = outcomes["lost"] + outcomes["released"]
    return Figure("preemptions", f"{num_preemptions:,}", detail if num_preemptions else "none", "#workers")


def _problems(facts: RunFacts) -> Figure:
    failed = facts.tally.states["failed"]
    rejected = f"{_counted(len(facts.rejects), 'line')} of the job file rejected"
    return Figure("dead-letters", f"{failed:,}", rejected, "#problems", "bad" if failed or facts.rejects else "good")


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
