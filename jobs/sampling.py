"""Sampling parameters of one job: the fields a user may set, their bounds, and the seed of a job that gives none."""

from __future__ import annotations

import hashlib
from typing import Annotated

from pydantic import Field, field_validator

from jobs.frozen import Strict
from jobs.sampling_defaults import ETA, PENALTY_WINDOW, REPETITION_PENALTY, TOP_P

MAX_COUNT = 2**31 - 1
MAX_SEED = 2**63 - 1
MAX_STOP_STRINGS = 16
MIN_TEMPERATURE = 1e-30  # below, quotients of ordinary logits leave float32
MIN_PENALTY, MAX_PENALTY = 1e-6, 1e6

StopString = Annotated[str, Field(min_length=1)]


class SamplingParams(Strict):
    """How the tokens of one job are drawn. Raises `pydantic.ValidationError` for a value out of its bounds.

    `max_tokens` and `penalty_window` count tokens; `temperature` 0 is greedy; `top_k`, `min_p` and `eta` are off at 0,
    `top_p` and `repetition_penalty` at 1. The penalty looks at the last `penalty_window` tokens, prompt included.
    """

    max_tokens: int = Field(ge=1, le=MAX_COUNT)
    temperature: float = Field(default=1.0, ge=0.0, le=100.0)
    top_k: int = Field(default=0, ge=0, le=MAX_COUNT)
    top_p: float = Field(default=TOP_P, gt=0.0, le=1.0)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    eta: float = Field(default=ETA, ge=0.0, lt=1.0)
    repetition_penalty: float = Field(default=REPETITION_PENALTY, ge=MIN_PENALTY, le=MAX_PENALTY)
    penalty_window: int = Field(default=PENALTY_WINDOW, ge=1, le=MAX_COUNT)
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    stop: tuple[StopString, ...] = Field(default=(), max_length=MAX_STOP_STRINGS)
    ignore_eos: bool = False

    @field_validator("temperature")
    @classmethod
    def _zero_or_large_enough(cls, value: float) -> float:
        if 0.0 < value < MIN_TEMPERATURE:
            raise ValueError(
                f"field 'temperature': found {value:g}, expected 0 (greedy) or a value of at least {MIN_TEMPERATURE:g}"
            )
        return value

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many_stop_strings(cls, value: object) -> object:
        if value is None:
            return ()
        if isinstance(value, str):
            return (value,)
        return tuple(value) if isinstance(value, list) else value


def derive_seed(run_seed: int, custom_id: str) -> int:
    """The seed (0 .. 2**63-1) of a job that gives none: it follows from the run's seed and `custom_id`."""
    digest = hashlib.sha256(f"{run_seed}:{custom_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
