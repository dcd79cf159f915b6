"""The parts of an output line that its readers rely on, see `jobs.run.results` for the whole of it."""

from __future__ import annotations

import json
import math
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from jobs.input.reasons import reasons, shown

MAX_DIGITS = 18  # fits 64 bits, as the columns of a table do


class _Part(BaseModel):
    model_config = ConfigDict(strict=True)


class _Message(_Part):
    content: str


class _Choice(_Part):
    finish_reason: str
    text: str | None = None
    message: _Message | None = None

    @model_validator(mode="after")
    def _has_text(self) -> Self:
        given = self.model_fields_set & {"text", "message"}
        if not given or any(getattr(self, name) is None for name in given):
            raise ValueError("found a choice without a text")
        return self


class _Usage(_Part):
    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)


class _Body(_Part):
    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage
    metrics: dict[str, Any]
    created: int = 0


class _Response(_Part):
    body: _Body


class _Error(_Part):
    code: str
    message: str


class _Line(_Part):
    id: str | None = None
    custom_id: str
    response: _Response | None
    error: _Error | None

    @model_validator(mode="after")
    def _has_one_of_them(self) -> Self:
        if (self.response is None) == (self.error is None):
            raise ValueError("found both or none of response and error, expected one")
        return self


def line_id(job_id: str) -> str:
    return f"batch_req_{job_id}"


def parse_line(data: bytes, job_id: str) -> dict[str, Any]:
    """A job's output line as it was written. Raises ValueError, in one line, for anything else."""
    if not data:
        raise ValueError("found an empty file")
    try:
        line: dict[str, Any] = json.loads(data, parse_constant=_number, parse_float=_number, parse_int=_whole_number)
        found = _Line.model_validate(line).id
    except ValidationError as error:
        raise ValueError(" ".join(reasons(error, _Line).split())) from None
    except RecursionError:
        raise ValueError("found JSON that is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"found no JSON: {error}") from None
    if found not in (None, line_id(job_id)):
        raise ValueError(f"found the line {shown(found)}, which is another job's")
    return line


def _number(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"found {text}, expected a number")
    return value


def _whole_number(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"found a number of {len(text)} digits, expected at most {MAX_DIGITS}")
    return int(text)
