"""Read the files of a run, and say plainly what is wrong with one that can't be used."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.input.validation_errors import reasons, shown
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

    Raises `DamagedError`, another `RunError` for another version's.
    """

    def parse(data: bytes) -> Model:
        values = _parse_object(data)
        if "version" in model.model_fields:
            _refuse_other_version(store, path, values.get("version"), model.model_fields["version"].default)
        try:
            return model.model_validate(values)
        except ValidationError as error:
            raise ValueError(reasons(error, model)) from None

    return read_parsed(store, path, parse)


def _refuse_other_version(store: Store, path: str, found: Any, expected: int) -> None:
    """Raise `RunError`, which is no `DamagedError`: the file is whole for another swiftbatch."""
    if found != expected:
        problem = f"found version {'none' if found is None else shown(found)}, expected version {expected}"
        raise RunError(_unusable(store, path, problem, "use the version of swiftbatch that made it"))


def _unusable(store: Store, path: str, problem: str, remedy: str = "restore it or use another folder") -> str:
    return f"cannot use {path} in {store.shown_uri}: {problem}; {remedy}"


def _parse_object(data: bytes) -> dict[str, Any]:
    value = json.loads(data)
    if not isinstance(value, dict):
        raise TypeError(f"found a {type(value).__name__}, expected a JSON object")
    return value
