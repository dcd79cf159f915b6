"""Read the files of a run, and say plainly what is wrong with one that can't be used."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.input.validation_errors import reasons
from swiftbatch.jobs.run.run_records import FORM, RUN_FORM, RUN_VERSION
from swiftbatch.jobs.storage.store import Store

NUM_READERS = 16  # at once: an object store takes its time for each
NUM_READ_AHEAD = 64

Model = TypeVar("Model", bound=BaseModel)
Value = TypeVar("Value")


class RunError(UserError):
    """The folder holds no run, or one that does not fit."""


class DamagedError(RunError):
    """A file was read, and what is in it can't be used: `path` names it below its folder, `problem` says why."""

    def __init__(self, store: Store, path: str, problem: str) -> None:
        super().__init__(_unusable(store, path, problem))
        self.path = path
        self.problem = problem


def pretty(model: BaseModel) -> bytes:
    """A model as JSON for the eye."""
    return model.model_dump_json(indent=2).encode() + b"\n"


def read_parsed(store: Store, path: str, parse: Callable[[bytes], Value]) -> Value | None:
    """Parse a file; None if it is absent. Raises `DamagedError` where `parse` raises `ValueError`."""
    data = store.read(path)
    if data is None:
        return None
    try:
        return parse(data)
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedError(store, path, " ".join(str(error).split())) from None


def read_object(store: Store, path: str) -> dict[str, Any] | None:
    """The JSON object in a file; None when it is absent. Raises `DamagedError`."""
    return read_parsed(store, path, _parse_object)


def read_model(store: Store, path: str, model: type[Model]) -> Model | None:
    """The model that a file holds as JSON; None when it is absent.

    Raises `DamagedError`, another `RunError` for a newer version's.
    """

    def parse(data: bytes) -> Model:
        values = _parse_object(data)
        version = values.get("version", RUN_VERSION)
        if version != RUN_VERSION:
            problem = f"found version {version}, expected {RUN_VERSION}, the one this swiftbatch writes"
            raise RunError(_unusable(store, path, problem))  # it is whole for another swiftbatch
        try:
            return model.model_validate(values)
        except ValidationError as error:
            problem = reasons(error, model)
            if (form := _form_of(values)) > RUN_FORM:
                newer = f"a newer swiftbatch made it (form {form}, this one knows {RUN_FORM}): {problem}"
                raise RunError(_unusable(store, path, newer, "update swiftbatch")) from None
            raise ValueError(problem) from None

    return read_parsed(store, path, parse)


def _form_of(values: dict[str, Any]) -> int:
    """The form of a run folder as a manifest has it; 0 for an older one, and for other files."""
    versions = values.get("versions")
    form = versions.get(FORM) if isinstance(versions, dict) else None
    return int(form) if isinstance(form, str) and form.isdecimal() else 0


def _unusable(store: Store, path: str, problem: str, remedy: str = "restore it or use another folder") -> str:
    return f"cannot use {path} in {store.shown_uri}: {problem}; {remedy}"


def _parse_object(data: bytes) -> dict[str, Any]:
    value = json.loads(data)
    if not isinstance(value, dict):
        raise TypeError(f"found a {type(value).__name__}, expected a JSON object")
    return value
