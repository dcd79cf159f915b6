"""Validates requests for new batches, and the fields of uploads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import islice
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, field_validator

from swiftbatch.jobs.input.request_fields import MAX_PRIORITY, Endpoint
from swiftbatch.jobs.input.validation_errors import FieldError, reasons, shown
from swiftbatch.jobs.json_records import Strict, whole
from swiftbatch.scheduler.serve.records.server_records import RefusedError

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
WINDOW = re.compile(r"([0-9]{1,6})([smhd])")
MIN_WINDOW_SECONDS, MAX_WINDOW_SECONDS = 1, 30 * 86400
EXPECTED_WINDOW = "expected a whole number with s, m, h or d behind it, as in 24h, from 1s to 30d"
MAX_PAIRS, MAX_KEY, MAX_VALUE = 16, 64, 512  # OpenAI's limits of metadata
MAX_LOOKED_AT = 64  # fields; a larger body has unknown ones among the first and is refused
MAX_URL = 2000
MIN_EXPIRY_SECONDS, MAX_EXPIRY_SECONDS = 3600, 30 * 86400  # seconds, OpenAI's limits
FORM_FIELD = re.compile(r"expires_after\[(.*)\]", re.DOTALL)


def window_seconds(text: str) -> int:
    """Parse a batch's time limit. Raises RefusedError."""
    found = WINDOW.fullmatch(text)
    seconds = int(found[1]) * UNITS[found[2]] if found else 0
    if not MIN_WINDOW_SECONDS <= seconds <= MAX_WINDOW_SECONDS:
        raise RefusedError(f"completion_window: found {text[:40]!a}, {EXPECTED_WINDOW}", param="completion_window")
    return seconds


def _utf8(text: str) -> str:
    """Refuse lone surrogates, which JSON may contain but files can't."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise FieldError("", "found half a character, expected text that can be written as UTF-8") from None
    return text


Form = TypeVar("Form", bound=Strict)
Text = Annotated[str, AfterValidator(_utf8)]
Key = Annotated[Text, Field(max_length=MAX_KEY)]
Value = Annotated[Text, Field(max_length=MAX_VALUE)]


class ExpiresAfter(Strict):
    """OpenAI's expiry of files; it is checked and ignored, since files stay."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_EXPIRY_SECONDS, le=MAX_EXPIRY_SECONDS), BeforeValidator(whole)]


def check_upload(fields: Mapping[str, Any]) -> None:
    """Check an upload's fields other than file and purpose. Raises RefusedError."""
    said: dict[str, Any] = {}
    for name, value in fields.items():
        found = FORM_FIELD.fullmatch(name)
        if found is None:
            expected = "expected one of: file, purpose, expires_after"
            raise RefusedError(f"unknown field {shown(name)}, {expected}", param=name[:80])
        said[found[1]] = int(value) if str(value).isdecimal() and len(value) < MAX_KEY else str(value)
    if said:
        _checked(ExpiresAfter, said, "expires_after")


class NewBatch(Strict):
    """The body of `POST /v1/batches`; the last two fields are not OpenAI's."""

    input_file_id: Text
    endpoint: Endpoint
    completion_window: Text
    metadata: dict[Key, Value] | None = None
    output_expires_after: ExpiresAfter | None = None
    # lower begins earlier, as for jobs
    priority: Annotated[int, BeforeValidator(whole)] = Field(default=0, ge=-MAX_PRIORITY - 1, le=MAX_PRIORITY)
    webhook: Annotated[Text, Field(max_length=MAX_URL)] | None = None

    @property
    def seconds(self) -> int:
        """The time limit. Raises RefusedError."""
        return window_seconds(self.completion_window)

    @field_validator("metadata", mode="before")
    @classmethod
    def _few(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_PAIRS:
            raise FieldError("", f"found {len(value):,} pairs, expected at most {MAX_PAIRS}")
        return value

    @classmethod
    def parse(cls, body: dict[str, Any]) -> NewBatch:
        """Validate a body; null means an absent field. Raises RefusedError."""
        said = islice(body.items(), MAX_LOOKED_AT)
        return _checked(cls, {name: value for name, value in said if value is not None})


def _checked(form: type[Form], values: dict[str, Any], within: str | None = None) -> Form:
    try:
        return form.model_validate(values)
    except ValidationError as error:
        [param, *_] = [within, *error.errors()[0]["loc"]] if within else [*error.errors()[0]["loc"], None]
        problem = reasons(error, form, f"{within}." if within else "")
        raise RefusedError(problem, param=None if param is None else str(param)) from None
