"""The parts of an output line that its readers rely on, see `jobs.results` for the whole of it."""

from __future__ import annotations

import json
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from jobs.reasons import reasons


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
        if self.text is None and self.message is None:
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
    custom_id: str
    response: _Response | None
    error: _Error | None

    @model_validator(mode="after")
    def _has_one_of_them(self) -> Self:
        if (self.response is None) == (self.error is None):
            raise ValueError("found both or none of response and error, expected one")
        return self


def parse_line(data: bytes) -> dict[str, Any]:
    """An output line as it was written. Raises ValueError, in one line, for anything else."""
    if not data:
        raise ValueError("found an empty file")
    try:
        line: dict[str, Any] = json.loads(data)
        _Line.model_validate(line)
    except ValidationError as error:
        raise ValueError(" ".join(reasons(error, _Line).split())) from None
    except RecursionError:
        raise ValueError("found JSON that is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"found no JSON: {error}") from None
    return line
