"""The prompts that a comparison reads, as data: without torch, so that a command can name its tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Prompts:
    """The prompts: each sequence reads another stretch of the text, `share` of the prompt's length long."""

    kind: Literal["books", "needle"] = "books"
    num_sequences: int = 1
    share: float = 1.0


def length_of(prompts: Prompts, prefill: int) -> int:
    """Tokens of each sequence's prompt."""
    return round(prefill * prompts.share)
