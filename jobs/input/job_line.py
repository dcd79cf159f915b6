"""What a good line asks for: a job, but for what its prompt's length decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jobs.chat import Message, TemplateOptions
from jobs.input.forms import LinePrompt
from jobs.job import Job
from jobs.sampling import SamplingParams


@dataclass(frozen=True)
class JobLine:
    """One line: `prompts` of a completion, `messages` of a chat."""

    custom_id: str
    prompts: tuple[LinePrompt, ...]
    messages: tuple[Message, ...] | None
    template: TemplateOptions | None
    sampling: Mapping[str, Any]  # all sampling fields but `max_tokens`, with a seed
    max_tokens: int | None  # None: the run's, or what the prompt leaves
    without_effect: tuple[str, ...] = ()  # the fields that were read and change nothing

    def jobs(self, max_tokens: Sequence[int]) -> list[Job]:
        """The jobs of the line; `max_tokens` are those behind each prompt, or behind the messages."""
        if self.messages is not None:
            return [self._job(None, max_tokens[0])]
        return [self._job(prompt, most) for prompt, most in zip(self.prompts, max_tokens, strict=True)]

    def _job(self, prompt: LinePrompt | None, max_tokens: int) -> Job:
        return Job(
            custom_id=self.custom_id,
            url="/v1/completions" if self.messages is None else "/v1/chat/completions",
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_ids=prompt if isinstance(prompt, tuple) else None,
            messages=self.messages,
            template=self.template,
            sampling=SamplingParams(max_tokens=max_tokens, **self.sampling),
        )
