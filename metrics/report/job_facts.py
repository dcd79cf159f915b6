"""The facts about one job that a report shows, or counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from swiftbatch.metrics.report.attempts import Attempt

DRAFTS = ("chain", "tree", "none")  # the ways in which tokens come

State = Literal["finished", "failed", "cancelled", "running", "pending"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """One job; `number` counts the run's from 1. `error` is (code, message).

    `prompt` and `excerpt`, of its answer, are empty where the job is only counted.
    """

    number: int
    name: str
    num_prompt_tokens: int
    max_tokens: int
    state: State
    num_tokens: int
    prompt: str = ""
    excerpt: str = ""
    finish_reason: str = ""
    error: tuple[str, str] | None = None
    num_drafts: int = 0
    num_accepted_tokens: int = 0
    num_tokens_by_draft: tuple[int, ...] | None = None  # in the order of `DRAFTS`
    attempts: tuple[Attempt, ...] = ()
    file: str | None = None  # of the run, that has its result or its error
    is_cut_thought: bool = False  # it ended before its thought did, for want of room
