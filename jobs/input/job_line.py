"""The job that a good line asks for, without what depends on its prompt's length."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swiftbatch.jobs.chat import Message, TemplateOptions
from swiftbatch.jobs.input.forms import LinePrompt
from swiftbatch.jobs.job import CHAT, COMPLETIONS, Job, JobUrl
from swiftbatch.jobs.repetition import RepetitionDetection
from swiftbatch.jobs.sampling import SamplingParams


@dataclass(frozen=True)
class JobLine:
    """One line: `prompts` of a completion, `messages` of a chat, and how many choices there are to be of each."""

    custom_id: str
    prompts: tuple[LinePrompt, ...]
    messages: tuple[Message, ...] | None
    template: TemplateOptions | None
    sampling: Mapping[str, Any]  # all sampling fields but `max_tokens`, with a seed
    num_choices: int
    max_tokens: int | None  # None: the run's, or what the prompt leaves
    priority: int = 0  # the job with the lower number begins first
    without_effect: tuple[str, ...] = ()  # the fields that were read and change nothing
    format_field: str | None = None  # None: no structure, or one of `structured_outputs`

    @property
    def url(self) -> JobUrl:
        """The endpoint that the line would be sent to."""
        return COMPLETIONS if self.messages is None else CHAT

    def jobs(self, max_tokens: Sequence[int], loop_guard: RepetitionDetection | None = None) -> list[Job]:
        """The jobs of the line: all choices of its first prompt, or of its messages, then those of the next prompt.

        `max_tokens` are those behind each prompt, or behind the messages; `loop_guard` is for a line that says nothing.
        """
        prompts: Sequence[LinePrompt | None] = self.prompts if self.messages is None else [None]
        limited = [each for each in zip(prompts, max_tokens, strict=True) for _ in range(self.num_choices)]
        said: RepetitionDetection | None = self.sampling.get("repetition_detection")
        detection = loop_guard if said is None else said if said.is_on else None
        sampling = {**self.sampling, "repetition_detection": detection}
        return [
            self._job(prompt, sampling | {"max_tokens": most}, number, len(limited))
            for number, (prompt, most) in enumerate(limited)
        ]

    def _job(self, prompt: LinePrompt | None, sampling: dict[str, Any], choice_index: int, num_choices: int) -> Job:
        seed = choice_seed(sampling["seed"], choice_index)
        return Job(
            custom_id=self.custom_id,
            url=self.url,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_ids=prompt if isinstance(prompt, tuple) else None,
            messages=self.messages,
            template=self.template,
            sampling=SamplingParams(**sampling | {"seed": seed}),
            choice_index=choice_index,
            num_choices=num_choices,
        )


def choice_seed(seed: int, choice_index: int) -> int:
    """The seed of a choice: the first has the line's, so that it is what it would be alone; others follow from it."""
    if choice_index == 0:
        return seed
    digest = hashlib.sha256(f"choice {choice_index} of {seed}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
