"""The two forms of an input line, and the job that a line describes."""

from __future__ import annotations

import json
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator

from jobs.frozen import Strict
from jobs.input.reasons import reasons, shown
from jobs.job import CustomId, Job, JobUrl, Messages, Prompt
from jobs.sampling import MAX_COUNT, SamplingParams, derive_seed

Line = TypeVar("Line", bound=BaseModel)


class LineError(ValueError):
    """A line describes no job; the text says which field, what was found and what was expected."""


class ShortLine(SamplingParams):
    """`{"custom_id": ..., "prompt": ..., "max_tokens": ...}`, or `messages` in place of `prompt`."""

    custom_id: CustomId
    prompt: Prompt | None = None
    messages: Messages | None = None

    @model_validator(mode="after")
    def _has_one_text(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            found = "neither" if self.prompt is None else "both"
            raise ValueError(f"fields 'prompt' and 'messages': found {found}, expected exactly one of them")
        return self


class BatchLine(Strict):
    """A line of OpenAI Batch; `url` says what the body is."""

    custom_id: CustomId
    method: Literal["POST"]
    url: JobUrl
    body: dict[str, Any]


class CompletionBody(SamplingParams):
    """Body for `/v1/completions`. The run decides the model, so `model` is read and not used."""

    model: str = ""
    prompt: Prompt
    stream: Literal[False] = False
    n: Literal[1] = 1


class ChatBody(SamplingParams):
    """Body for `/v1/chat/completions`."""

    model: str = ""
    messages: Messages
    stream: Literal[False] = False
    n: Literal[1] = 1
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_COUNT)

    @model_validator(mode="before")
    @classmethod
    def _one_token_limit(cls, values: Any) -> Any:
        if values.get("max_completion_tokens") is None:
            return values
        limit = values["max_completion_tokens"]
        if values.get("max_tokens") not in (None, limit):
            raise ValueError("fields 'max_tokens' and 'max_completion_tokens': found two limits, expected one")
        return {**values, "max_tokens": limit}


def parse_object(text: str) -> dict[str, Any]:
    """The JSON object of one line, in which no name is given twice. Raises `LineError`.

    NaN and Infinity pass here: no field takes them, and the refusal can then name the field.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique_names)
    except json.JSONDecodeError as error:
        raise LineError(f"not JSON: {error.msg} at column {error.colno}, expected one object on the line") from None
    except RecursionError:
        raise LineError("not readable: nested too deeply, expected one flat object on the line") from None
    except LineError:
        raise
    except ValueError:  # Python refuses to convert numbers of thousands of digits
        raise LineError("not readable: found a number of thousands of digits, expected ordinary numbers") from None
    if not isinstance(value, dict):
        raise LineError(f"found {shown(value)}, expected a JSON object")
    return value


def job_from_object(values: dict[str, Any], run_seed: int) -> Job:
    """The job of one parsed line; a missing seed is derived from `run_seed`. Raises `LineError`."""
    if values.keys() & {"method", "url", "body"}:
        return _job_from_batch_line(_validated(BatchLine, values), run_seed)
    line = _validated(ShortLine, values)
    url: JobUrl = "/v1/completions" if line.messages is None else "/v1/chat/completions"
    sampling = _sampling(line, line.custom_id, run_seed)
    return Job(custom_id=line.custom_id, url=url, prompt=line.prompt, messages=line.messages, sampling=sampling)


def _job_from_batch_line(line: BatchLine, run_seed: int) -> Job:
    if line.url == "/v1/completions":
        completion = _validated(CompletionBody, line.body, "body.")
        sampling = _sampling(completion, line.custom_id, run_seed)
        return Job(custom_id=line.custom_id, url=line.url, prompt=completion.prompt, sampling=sampling)
    chat = _validated(ChatBody, line.body, "body.")
    sampling = _sampling(chat, line.custom_id, run_seed)
    return Job(custom_id=line.custom_id, url=line.url, messages=chat.messages, sampling=sampling)


def _validated(form: type[Line], values: dict[str, Any], prefix: str = "") -> Line:
    """Check one object. Raises `LineError`. As in OpenAI's API, null stands for the default of a field that has one."""
    optional = {name for name, field in form.model_fields.items() if not field.is_required()}
    try:
        return form.model_validate({k: v for k, v in values.items() if v is not None or k not in optional})
    except ValidationError as error:
        raise LineError(reasons(error, form, prefix)) from None


def _sampling(line: SamplingParams, custom_id: str, run_seed: int) -> SamplingParams:
    """The sampling fields alone of a line, with a seed."""
    values = {name: getattr(line, name) for name in SamplingParams.model_fields}
    if line.seed is None:
        values["seed"] = derive_seed(run_seed, custom_id)
    return SamplingParams(**values)


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise LineError(f"field {shown(name)}: found twice, expected once")
        values[name] = value
    return values
