"""Sampling parameters of one job, detection of loops, their bounds, and the derived seed."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_serializer, field_validator, model_validator

from swiftbatch.jobs.json_records import FieldError, Strict, list_of, of_checked, shown, whole
from swiftbatch.jobs.structured_output import Structure, structure_of

MAX_PATTERN = 4096  # tokens
MAX_REPETITIONS = 2**31 - 1
MAX_REWINDS = 100

LoopAction = Literal["stop", "rewind", "close"]


class RepetitionDetection(Strict):
    """Detects an output that ends with a pattern repeated `min_count` times.

    Patterns have `min_pattern_size` to `max_pattern_size` tokens; a maximum of 0 turns it off. "stop" ends the output.
    "rewind" (not in vLLM) drops the repetitions and draws again, up to `max_rewinds` times. "close" closes a looping
    thought. Raises `pydantic.ValidationError`.
    """

    max_pattern_size: int = Field(default=0, ge=0, le=MAX_PATTERN)
    min_pattern_size: int = Field(default=0, ge=0, le=MAX_PATTERN)
    min_count: int = Field(default=0, ge=0, le=MAX_REPETITIONS)
    action: LoopAction = "stop"
    max_rewinds: int = Field(default=3, ge=0, le=MAX_REWINDS)

    @field_validator("max_pattern_size", "min_pattern_size", "min_count", "max_rewinds", mode="before")
    @classmethod
    def _whole(cls, value: Any) -> Any:
        return whole(value)

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.is_on and self.min_count < 2:
            raise FieldError("min_count", f"found {self.min_count}, expected at least 2 with max_pattern_size")
        if self.is_on and self.min_pattern_size > self.max_pattern_size:
            raise FieldError(
                "min_pattern_size",
                f"found {self.min_pattern_size}, expected at most max_pattern_size, {self.max_pattern_size}",
            )
        return self

    @property
    def is_on(self) -> bool:
        return self.max_pattern_size > 0

    @property
    def smallest_pattern(self) -> int:
        return max(1, self.min_pattern_size)


def loop_guard(action: LoopAction | None) -> RepetitionDetection | None:
    """Return the detection for `--loop-guard`: patterns of at least 64 tokens, so that a row of dots does not count.

    Shorter patterns are found as multiples of themselves. Job ids depend on these values.
    """
    if action is None:
        return None
    return RepetitionDetection(max_pattern_size=256, min_pattern_size=16, min_count=4, action=action)


def without_closing(detection: RepetitionDetection) -> RepetitionDetection:
    return detection.model_copy(update={"action": "stop"}) if detection.action == "close" else detection


# All parameters of a job.


TOP_P = 1.0
ETA = 0.0
REPETITION_PENALTY = 1.0
PENALTY_WINDOW = 1024  # tokens

MAX_BIASED = 10_000  # tokens
MAX_BIAS = 100.0
TOKEN = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)

LogitBias = tuple[tuple[int, float], ...]
"""Token ids, ascending, each with the number that is added to its logit."""
MAX_TOP_LOGPROBS = 20  # OpenAI's bound for chats
MAX_COUNT = 2**31 - 1
MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1  # the range of signed and unsigned 64-bit numbers, as in other servers
MAX_STOP_STRINGS = 16
MAX_STOP_TOKENS = 64
MAX_BAD_WORDS = 128
MAX_OUTPUT_PENALTY = 2.0  # OpenAI's bound for frequency and presence penalty
MIN_TEMPERATURE = 1e-30  # below it, ordinary logits divided by it overflow float32
MIN_PENALTY, MAX_PENALTY = 1e-6, 1e6

NO_LOGPROBS = "with logprobs, expected no such field: a marker that is put into the text has none"

ThinkingEnd = Literal["stop", "close"]
ALONE: Literal["alone"] = "alone"
"""An echo in place of the output, which is one token that the result does not show."""

# Fields added later: at their defaults, these do not change a job's id.
LATER_FIELDS = (
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "min_tokens",
    "stop_token_ids",
    "include_stop_str_in_output",
    "bad_words",
    "repetition_detection",
    "logprobs",
    "structured_outputs",
    "thinking_token_budget",
    "thinking_end",
    "stop_in_reasoning",
    "return_token_ids",
    "truncate_prompt_tokens",
    "echo",
    "prompt_logprobs",
)

WRITTEN_OTHERWISE = {"logit_bias", "repetition_detection", "structured_outputs"}  # JSON changes only these

StopString = Annotated[str, Field(min_length=1)]
BadWord = Annotated[str, Field(min_length=1, pattern=r"\S")]
BadWords = Annotated[tuple[BadWord, ...], BeforeValidator(list_of(f"a list of up to {MAX_BAD_WORDS} strings"))]
TokenId = Annotated[int, Field(ge=0, le=MAX_COUNT), BeforeValidator(whole)]
StopTokens = Annotated[tuple[TokenId, ...], BeforeValidator(list_of(f"a list of up to {MAX_STOP_TOKENS} token ids"))]
OutputPenalty = Annotated[float, Field(ge=-MAX_OUTPUT_PENALTY, le=MAX_OUTPUT_PENALTY)]


def bias_pairs(value: object) -> object:
    """Parse a logit_bias object into pairs; pairs pass unchanged. Raises FieldError."""
    if isinstance(value, tuple):
        return value
    if not isinstance(value, Mapping):
        expected = 'an object of token ids and numbers, such as {"50256": -100}'
        raise FieldError("", f"found {shown(value)}, expected {expected}")
    if len(value) > MAX_BIASED:
        raise FieldError("", f"found {len(value)} tokens, expected at most {MAX_BIASED}")
    pairs = {_token_id(name): _bias(name, bias) for name, bias in value.items()}
    return tuple(sorted(pairs.items()))


def _token_id(name: object) -> int:
    if isinstance(name, str) and TOKEN.fullmatch(name):
        return int(name)
    if isinstance(name, int) and not isinstance(name, bool) and name >= 0:
        return name
    raise FieldError("", f'found {shown(name)} as a token, expected its number, such as "50256"')


def _bias(name: object, bias: object) -> float:
    if isinstance(bias, int | float) and not isinstance(bias, bool) and -MAX_BIAS <= bias <= MAX_BIAS:
        return float(bias)
    expected = f"a number from {-MAX_BIAS:g} to {MAX_BIAS:g}"
    raise FieldError(str(name), f"found {shown(bias)}, expected {expected}")


class SamplingParams(Strict):
    """The parameters that decide how a job's tokens are drawn. Raises `pydantic.ValidationError`.

    `temperature` 0 is greedy; `top_k`, `min_p` and `eta` are off at 0, `top_p` and `repetition_penalty` at 1. The
    repetition penalty covers the last `penalty_window` tokens, prompt included.

    Order and meaning are vLLM's: mask `bad_words` (the last token after the others, with and without a space in front),
    and end tokens and `stop_token_ids` up to `min_tokens`, also with `ignore_eos`; add `logit_bias`; penalize
    repetitions; subtract `frequency_penalty` x output count and `presence_penalty`; then temperature, top-k, top-p,
    min-p, eta.

    `logprobs` is the number of likeliest tokens to report; `return_token_ids` reports the tokens of prompt and output.
    After `thinking_token_budget` tokens a thought is closed. `thinking_end` "close" (not in vLLM) closes a thought
    where the text would end. Stop strings match in the answer, or with `stop_in_reasoning` also in thoughts.
    `truncate_prompt_tokens` keeps the prompt's last tokens; -1 keeps as many as fit. `echo` puts the prompt before the
    output, or in its place; `prompt_logprobs` is the number of likeliest tokens to report for each of the prompt's.
    """

    max_tokens: int = Field(ge=1, le=MAX_COUNT)
    temperature: float = Field(default=1.0, ge=0.0, le=100.0)
    top_k: int = Field(default=0, ge=0, le=MAX_COUNT)
    top_p: float = Field(default=TOP_P, gt=0.0, le=1.0)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    eta: float = Field(default=ETA, ge=0.0, lt=1.0)
    repetition_penalty: float = Field(default=REPETITION_PENALTY, ge=MIN_PENALTY, le=MAX_PENALTY)
    penalty_window: int = Field(default=PENALTY_WINDOW, ge=1, le=MAX_COUNT)
    seed: int | None = Field(default=None, ge=MIN_SEED, le=MAX_SEED)
    stop: tuple[StopString, ...] = Field(default=(), max_length=MAX_STOP_STRINGS)
    ignore_eos: bool = False
    frequency_penalty: OutputPenalty = 0.0
    presence_penalty: OutputPenalty = 0.0
    logit_bias: LogitBias = ()
    min_tokens: int = Field(default=0, ge=0, le=MAX_COUNT)
    stop_token_ids: StopTokens = Field(default=(), max_length=MAX_STOP_TOKENS)
    include_stop_str_in_output: bool = False
    bad_words: BadWords = Field(default=(), max_length=MAX_BAD_WORDS)
    repetition_detection: RepetitionDetection | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    structured_outputs: Structure | None = None
    thinking_token_budget: int | None = Field(default=None, ge=0, le=MAX_COUNT)
    thinking_end: ThinkingEnd | None = None
    stop_in_reasoning: bool = False
    return_token_ids: bool = False
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, le=MAX_COUNT)
    echo: bool | Literal["alone"] = False
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)

    @field_validator(
        *("max_tokens", "top_k", "penalty_window", "seed", "min_tokens", "logprobs", "thinking_token_budget"),
        *("truncate_prompt_tokens", "prompt_logprobs"),
        mode="before",
    )
    @classmethod
    def _whole(cls, value: Any) -> Any:
        return whole(value)

    @field_validator("temperature")
    @classmethod
    def _zero_or_large_enough(cls, value: float) -> float:
        if 0.0 < value < MIN_TEMPERATURE:
            raise FieldError("", f"found {value:g}, expected 0 (greedy) or a value of at least {MIN_TEMPERATURE:g}")
        return value

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _keeps_some(cls, value: int | None) -> int | None:
        if value == 0:
            raise FieldError("", "found 0, expected at least 1 token, or -1: as many as fit")
        return value

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many_stop_strings(cls, value: object) -> object:
        if value is None:
            return ()
        expected = f"a string, or a list of up to {MAX_STOP_STRINGS} strings"
        texts = (value,) if isinstance(value, str) else list_of(expected)(value)
        return tuple(text for text in texts if text != "")  # programs send "" for none

    @field_validator("stop_token_ids")
    @classmethod
    def _each_token_once(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(set(value)))

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _tokens_with_bias(cls, value: object) -> object:
        return bias_pairs(value)

    @field_validator("structured_outputs", mode="before")
    @classmethod
    def _structure(cls, value: object) -> object:
        return structure_of(value)

    @field_serializer("logit_bias")
    def _as_object(self, value: LogitBias) -> dict[str, float]:
        return {str(token_id): bias for token_id, bias in value}

    @field_serializer("structured_outputs")
    def _as_said(self, value: Structure | None) -> dict[str, Any] | None:
        return None if value is None else value.as_said()

    @model_validator(mode="after")
    def _may_end(self) -> Self:
        most: int | None = self.max_tokens  # a line may leave it open
        if most is not None and self.min_tokens > most:
            raise FieldError("min_tokens", f"found {self.min_tokens}, expected at most max_tokens, {most}")
        if self.structured_outputs is not None:
            self._ends_where_its_structure_does()
        if self.logprobs is not None and self.thinking_end == "close":
            raise FieldError("thinking_end", f"found 'close' {NO_LOGPROBS}")
        if self.logprobs is not None and self.repetition_detection and self.repetition_detection.action == "close":
            raise FieldError("repetition_detection.action", f"found 'close' {NO_LOGPROBS}")
        return self

    def _ends_where_its_structure_does(self) -> None:
        for name, value in (("min_tokens", self.min_tokens), ("ignore_eos", self.ignore_eos)):
            if value:
                found = "true" if value is True else value
                expected = "expected no such field: its end is its own"
                raise FieldError(name, f"found {found} with a structured output, {expected}")

    def with_own(self, max_tokens: int, seed: int) -> Self:
        return of_checked(type(self), {**self.__dict__, "max_tokens": max_tokens, "seed": seed})

    @property
    def num_top_of_prompt(self) -> int | None:
        """Return how many likeliest tokens are needed for each of the prompt's, or None for no log-probabilities."""
        asked = (self.prompt_logprobs, self.logprobs if self.echo else None)
        return max((each for each in asked if each is not None), default=None)

    def identity(self) -> dict[str, Any]:
        """Return JSON for a job's id, without later fields at their defaults."""
        later = _later_defaults()
        said = {name: value for name, value in self.__dict__.items() if name not in later or value != later[name]}
        if not said.keys() & WRITTEN_OTHERWISE:
            return said
        return self.model_dump(mode="json", include=set(said))


@functools.cache
def _later_defaults() -> dict[str, Any]:
    fields = SamplingParams.model_fields  # looking one up costs more than a comparison
    return {name: fields[name].default for name in LATER_FIELDS}


def derive_seed(run_seed: int, custom_id: str) -> int:
    """Derive a job's seed, 0 .. 2**63-1."""
    digest = hashlib.sha256(f"{run_seed}:{custom_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
