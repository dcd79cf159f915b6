"""A job: one prompt, how to continue it, and the identity that ties results and checkpoints to it."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from jobs.frozen import Strict
from jobs.sampling import SamplingParams

MAX_CUSTOM_ID = 512
MAX_SLUG = 40

JobUrl = Literal["/v1/completions", "/v1/chat/completions"]


class Message(Strict):
    """One message of a chat job."""

    role: str = Field(min_length=1)
    content: str


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


CustomId = Annotated[str, Field(min_length=1, max_length=MAX_CUSTOM_ID)]
Prompt = Annotated[str, Field(min_length=1)]
Messages = Annotated[tuple[Message, ...], BeforeValidator(_as_tuple), Field(min_length=1)]


class Job(Strict):
    """One generation job, valid and complete: exactly one of `prompt` and `messages`, and a seed."""

    custom_id: CustomId
    url: JobUrl
    prompt: Prompt | None = None
    messages: Messages | None = None
    sampling: SamplingParams

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        wanted = "messages" if self.url == "/v1/chat/completions" else "prompt"
        if (self.prompt is None) == (wanted == "prompt") or (self.messages is None) == (wanted == "messages"):
            raise ValueError(f"expected '{wanted}' and nothing else to continue for {self.url}")
        if self.sampling.seed is None:
            raise ValueError("expected a seed: a job draws the same tokens every time")
        return self

    def job_id(self, model_fingerprint: str) -> str:
        """A safe file name, the same for the same (custom_id, model, prompt, sampling): a slug, '-', 16 hex digits."""
        messages = None if self.messages is None else [message.model_dump() for message in self.messages]
        identity = [self.custom_id, model_fingerprint, self.prompt, messages, self.sampling.identity()]
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        return f"{_slug(self.custom_id)}-{digest[:16]}"


def _slug(custom_id: str) -> str:
    safe = re.sub(r"[^A-Za-z0-9_]+", "-", custom_id).strip("-")
    return safe[:MAX_SLUG].rstrip("-") or "job"


@dataclass(frozen=True)
class JobRecord:
    """A job of a run: its `job_id`, where it stood in the file (lines from 1) and how many tokens its prompt has."""

    job_id: str
    job: Job
    line_number: int
    num_prompt_tokens: int

    @property
    def max_length(self) -> int:
        """Positions that it needs if it runs to its `max_tokens`."""
        return self.num_prompt_tokens + self.job.sampling.max_tokens
