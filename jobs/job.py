"""A job: one prompt, its sampling, and its id."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from swiftbatch.jobs.chat import Message, TemplateOptions
from swiftbatch.jobs.input.validation_errors import list_of
from swiftbatch.jobs.json_records import Strict
from swiftbatch.jobs.sampling_params import SamplingParams

MAX_CUSTOM_ID = 512
MAX_SLUG = 40
SORTED = json.JSONEncoder(sort_keys=True)  # `dumps` would make an encoder for each job
LINE_END = b"\n"
LATER_FIELDS = {"prompt_ids", "template", "choice_index", "num_choices"}

JobUrl = Literal["/v1/completions", "/v1/chat/completions"]
COMPLETIONS: JobUrl = "/v1/completions"
CHAT: JobUrl = "/v1/chat/completions"


LastMarker = Literal["start", "end"]
"""The marker of thinking that comes last in a prompt: whether it leaves a thought open."""

CustomId = Annotated[str, Field(min_length=1, max_length=MAX_CUSTOM_ID)]
Prompt = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[tuple[TokenId, ...], BeforeValidator(list_of("a list of token ids")), Field(min_length=1)]
Messages = Annotated[tuple[Message, ...], BeforeValidator(list_of("a list of messages")), Field(min_length=1)]


class Job(Strict):
    """One generation job with one of `prompt`, `prompt_ids` and `messages`.

    Choices of one line are jobs with the same `custom_id` and different `choice_index`.
    """

    custom_id: CustomId
    url: JobUrl
    prompt: Prompt | None = None
    prompt_ids: TokenIds | None = None
    messages: Messages | None = None
    template: TemplateOptions | None = None
    sampling: SamplingParams
    choice_index: int = Field(default=0, ge=0)
    num_choices: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        is_chat = self.url == "/v1/chat/completions"
        num_prompts = (self.prompt is not None) + (self.prompt_ids is not None)
        if num_prompts != (not is_chat) or (self.messages is not None) != is_chat or (self.template and not is_chat):
            wanted = "messages" if is_chat else "prompt"
            raise ValueError(f"expected '{wanted}' and nothing else to continue for {self.url}")
        if self.sampling.seed is None:
            raise ValueError("expected a seed: a job draws the same tokens every time")
        if self.choice_index >= self.num_choices:
            raise ValueError(f"found choice {self.choice_index}, expected one of {self.num_choices}, from 0 on")
        return self

    @property
    def name(self) -> str:
        """Return the name in messages, such as `story` or `story[2]`."""
        return self.custom_id if self.num_choices == 1 else f"{self.custom_id}[{self.choice_index}]"

    def job_id(self, model_fingerprint: str) -> str:
        """Return a file name of custom_id, model, prompt and sampling: slug, '-', 16 hex digits."""
        messages = None if self.messages is None else [message.as_sent() for message in self.messages]
        identity = [self.custom_id, model_fingerprint, self.prompt, messages, self.sampling.identity()]
        # jobs without these later fields keep their earlier id
        says_later = self.prompt_ids is not None or self.template is not None or self.num_choices > 1
        if says_later and (later := self.model_dump(mode="json", include=LATER_FIELDS, exclude_defaults=True)):
            identity.append(later)
        digest = hashlib.sha256(SORTED.encode(identity).encode()).hexdigest()
        slug = _slug(self.custom_id) if self.num_choices == 1 else f"{_slug(self.custom_id)}-{self.choice_index}"
        return f"{slug}-{digest[:16]}"


def _slug(custom_id: str) -> str:
    safe = re.sub(r"[^A-Za-z0-9_]+", "-", custom_id).strip("-")
    return safe[:MAX_SLUG].rstrip("-") or "job"


def packed(token_ids: list[int]) -> bytes:
    """Encode token ids as little-endian uint32."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def unpacked(data: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(data) // 4}I", data))


@dataclass(frozen=True)
class JobRecord:
    """A job of a run with its tokenized prompt.

    `line_number` counts from 1 over all files submitted together; the lower one breaks ties. `supersedes` is the
    shorter job it continues. `prompt_token_ids` (`packed`) and `last_marker` are kept because a later rendering may
    differ.
    """

    job_id: str
    job: Job
    line_number: int
    num_prompt_tokens: int
    supersedes: str | None = None
    prompt_keys: bytes = b""
    prompt_token_ids: bytes = b""
    last_marker: LastMarker | None = None

    @property
    def custom_id(self) -> str:
        return self.job.custom_id

    @property
    def max_length(self) -> int:
        return self.num_prompt_tokens + self.job.sampling.max_tokens

    @property
    def body(self) -> bytes:
        """Return JSON, `last_marker` and `prompt_token_ids`, joined by line ends."""
        parts = self.job.model_dump_json().encode(), (self.last_marker or "").encode(), self.prompt_token_ids
        return LINE_END.join(parts)

    @classmethod
    def of_body(cls, job_id: str, line_number: int, num_prompt_tokens: int, body: bytes) -> Self:
        """Parse a `body`, which has all that a worker needs."""
        job, marker, token_ids = body.split(LINE_END, 2)
        prompt = {"prompt_token_ids": token_ids, "last_marker": marker.decode() or None}
        return cls(job_id, Job.model_validate_json(job), line_number, num_prompt_tokens, **prompt)  # type: ignore[arg-type]
