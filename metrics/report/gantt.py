"""Jobs over workers as bars in lanes, placed in percent of the run's time: HTML scales them, no script is needed."""

from __future__ import annotations

from dataclasses import dataclass

from swiftbatch.metrics.report.attempts import Attempt
from swiftbatch.metrics.report.page_text import clock
from swiftbatch.metrics.report.run_facts import RunFacts
from swiftbatch.metrics.report.totals import LongAttempt

NUM_TONES = 6
MIN_PERCENT = 0.08  # of the width: shorter bars could not be seen
TINY_PERCENT = 1.2  # a shorter bar has no room for a sign
ENDS = {
    "finished": "finished",
    "released": "handed back with all its tokens",
    "lost": "lost, with what it had not written",
    "cancelled": "cancelled",
    "running": "still running",
}


@dataclass(frozen=True)
class Bar:
    """One attempt. `left` and `width` are percentages of the run's time, `wait` of the bar: until its first token."""

    left: float
    width: float
    wait: float
    tone: int
    outcome: str
    is_resume: bool
    job_number: int
    label: str
    text: str

    @property
    def is_tiny(self) -> bool:
        """True if there is no room for anything in the bar."""
        return self.width < TINY_PERCENT


@dataclass(frozen=True)
class WorkerRow:
    """One worker of one driver, with a lane for each job that it had at once."""

    name: str
    lanes: tuple[tuple[Bar, ...], ...]


@dataclass(frozen=True)
class Gantt:
    """All workers in the order in which they came; `num_left_out` attempts were too short to be shown."""

    rows: tuple[WorkerRow, ...]
    num_left_out: int


def gantt(facts: RunFacts, begin: float, end: float) -> Gantt:
    """The attempts of a run between two times, in seconds since the epoch; of too many the longest."""
    longest = facts.tally.longest
    workers: dict[tuple[int, str], list[tuple[Attempt, Bar]]] = {}
    for entry in sorted(longest, key=lambda entry: (entry.attempt.start, entry.job_number)):
        attempt, bar = entry.attempt, _bar(entry, begin, end)
        workers.setdefault((attempt.driver, attempt.worker_id), []).append((attempt, bar))
    by_age = sorted(workers, key=lambda key: (key[0], len(key[1]), key[1]))  # w2 before w10
    rows = tuple(WorkerRow(_name(key, facts.num_drivers), _lanes(workers[key])) for key in by_age)
    return Gantt(rows, len(facts.tally.starts) - len(longest))


def attempt_line(attempt: Attempt, begin: float) -> str:
    """An attempt in words; times since `begin`."""
    words = f"attempt {attempt.number} on {attempt.worker_id}, {clock(attempt.start - begin)} to "
    words += f"{clock(attempt.end - begin)}: "
    if attempt.resume is not None:
        words += f"resumed ({attempt.resume.kind}) in {attempt.resume.seconds:.1f} s with "
        words += f"{attempt.resume.num_recovered_tokens:,} tokens, {attempt.resume.num_recomputed_tokens:,} drawn "
        words += "again; "
    return words + ENDS[attempt.outcome]


def _bar(entry: LongAttempt, begin: float, end: float) -> Bar:
    attempt = entry.attempt
    span = max(end - begin, 1e-9)
    seconds = max(attempt.end - attempt.start, 1e-9)
    return Bar(
        left=round(100 * (attempt.start - begin) / span, 3),
        width=round(max(100 * seconds / span, MIN_PERCENT), 3),
        wait=round(100 * min(1.0, max(0.0, (attempt.first_token - attempt.start) / seconds)), 1),
        tone=entry.job_number % NUM_TONES,
        outcome=attempt.outcome,
        is_resume=attempt.resume is not None,
        job_number=entry.job_number,
        label=entry.job_name,
        text=f"{entry.job_name}: {attempt_line(attempt, begin)}",
    )


def _lanes(bars: list[tuple[Attempt, Bar]]) -> tuple[tuple[Bar, ...], ...]:
    """Each bar in the first lane that is free when it starts; `bars` come by their start."""
    lanes: list[list[Bar]] = []
    ends: list[float] = []
    for attempt, bar in bars:
        lane = next((lane for lane, end in enumerate(ends) if end <= attempt.start), len(lanes))
        if lane == len(lanes):
            lanes.append([])
            ends.append(0.0)
        lanes[lane].append(bar)
        ends[lane] = attempt.end
    return tuple(tuple(lane) for lane in lanes)


def _name(key: tuple[int, str], num_drivers: int) -> str:
    driver, worker_id = key
    return worker_id if num_drivers < 2 else f"{worker_id} of driver {driver}"
