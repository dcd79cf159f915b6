"""A server's records of files and batches, and requests for new ones; times in seconds since the epoch.

files/<file_id>/content        the bytes
files/<file_id>/file.json      written last: without it the file does not exist
batches/<batch_id>/            a run, and beside it
batches/<batch_id>/batch.json  the request, written once: without it the batch does not exist
batches/<batch_id>/cancel.json when and by whom it was cancelled
batches/<batch_id>/ended.json  the outcome, written last: then nothing else of the batch is read
webhooks/<batch_id>.json       to whom the batch's end is yet to be posted
audit/                         who did what: see `audit_log.py`

Ids are random letters and digits; no other name becomes part of a path.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from itertools import islice
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, field_validator

from swiftbatch.jobs.checkpoints.checkpoint_files import Moment
from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.input.request_fields import MAX_PRIORITY, Endpoint
from swiftbatch.jobs.job import JobUrl
from swiftbatch.jobs.json_records import FieldError, Frozen, Strict, is_utf8, reasons, shown, whole
from swiftbatch.jobs.run.error_files import NO_FILE
from swiftbatch.jobs.run.run_records import DamagedError, Model, cost_of, read_model
from swiftbatch.jobs.storage.store import Store

FILE_ID = re.compile(r"file-[0-9a-f]{24}")
BATCH_ID = re.compile(r"batch_[0-9a-f]{24}")
NUM_BYTES = 12

Delivery = Literal["output", "errors"]
"""The two files that a batch ends with."""
Purpose = Literal["batch", "batch_output"]
Target = Literal["server", "batch"]
"""The address of `--webhook` ("server"), or the one that the batch came with ("batch")."""
EndState = Literal["completed", "failed", "expired", "cancelled"]
State = Literal["validating", "in_progress", "finalizing", "cancelling", EndState]

FILES, BATCHES, WEBHOOKS = "files", "batches", "webhooks"
CONTENT, FILE = "content", "file.json"
BATCH, CANCEL, ENDED = "batch.json", "cancel.json", "ended.json"


class RefusedError(UserError):
    """A refused request: HTTP status, parameter and error code."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


def new_file_id() -> str:
    return f"file-{secrets.token_hex(NUM_BYTES)}"


def new_batch_id() -> str:
    return f"batch_{secrets.token_hex(NUM_BYTES)}"


def id_of_key(kind: Literal["file-", "batch_"], owner: str | None, key: str) -> str:
    return kind + _digits(json.dumps([owner, key]))


def delivered_file_id(batch_id: str, delivery: Delivery) -> str:
    """Return the fixed id of a batch's result file."""
    return "file-" + _digits(f"{batch_id} {delivery}")


def _digits(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[: 2 * NUM_BYTES]


def is_file_id(name: str) -> bool:
    return FILE_ID.fullmatch(name) is not None


def is_batch_id(name: str) -> bool:
    return BATCH_ID.fullmatch(name) is not None


def read_record(store: Store, path: str, model: type[Model]) -> Model | None:
    """Read a record; None if its folder lists none. Raises RunError, StoreError."""
    record = read_model(store, path, model)
    folder, _, name = path.rpartition("/")
    if record is None and name in store.list(folder):
        raise DamagedError(store, path, NO_FILE)
    return record


class FileRecord(Frozen):
    """`file.json`; `owner` is None without keys."""

    version: Literal[1] = 1
    id: str
    created: Moment
    filename: str
    purpose: Purpose
    num_bytes: int = Field(ge=0)
    owner: str | None = None


class BatchRecord(Frozen):
    """`batch.json`; unfinished jobs are given up at `expires`."""

    version: Literal[1] = 1
    id: str
    created: Moment
    input_file_id: str
    endpoint: JobUrl
    completion_window: str
    expires: Moment
    metadata: dict[str, str] | None = None
    owner: str | None = None
    priority: int = 0  # among the owner's batches; lower begins earlier
    webhook: str | None = None  # its end is posted to this address


class Cancellation(Frozen):
    version: Literal[1] = 1
    requested: Moment
    requested_by: str | None = None  # the key's name; None without keys


class Counts(Frozen):
    """Numbers of a batch's lines; rejects count as failed."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class LineProblem(Frozen):
    """The reason why a line failed, or the whole file for None."""

    code: str
    message: str
    line: int | None = None


class Ended(Frozen):
    """`ended.json`; a file is None if it would be empty."""

    version: Literal[1] = 1
    state: EndState
    counts: Counts
    in_progress: Moment | None
    finalizing: Moment
    ended: Moment
    num_total_tokens: int = 0  # lines that were given up included
    num_generated_tokens: int = 0  # of lines in the output file, as the next two
    num_input_tokens: int | None = None  # None in records of earlier versions
    num_reasoning_tokens: int = 0
    worker_seconds: float = 0.0
    price_per_worker_hour: float | None = None
    model: str | None = None  # None without a run
    output_file_id: str | None = None
    error_file_id: str | None = None
    problems: tuple[LineProblem, ...] = ()

    @property
    def cost(self) -> float | None:
        return cost_of(self.worker_seconds, self.price_per_worker_hour)


class PendingMessage(Frozen):
    version: Literal[1] = 1
    targets: tuple[Target, ...]


# Requests for new batches, and the fields of uploads.


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
    if not is_utf8(text):
        raise FieldError("", "found half a character, expected text that can be written as UTF-8")
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
