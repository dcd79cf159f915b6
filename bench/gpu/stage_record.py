"""The record of a stage: one JSON file, whole at any moment, which its process and then the command write."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.json_records import Frozen
from swiftbatch.jobs.storage.store import Store
from swiftbatch.worker.exactness.gpu_doctor.findings import Result

StageState = Literal["running", "passed", "failed", "ended", "killed"]
ENDINGS: frozenset[StageState] = frozenset({"passed", "failed", "ended", "killed"})


class GPUStageRecord(Frozen):
    """The end of one stage. `ended`: its process did, before it had done all; `killed`: its time was over."""

    stage: str
    state: StageState
    words: str = ""  # why, where it is neither passed nor failed
    seconds: float = 0.0
    proves: tuple[str, ...] = ()
    results: tuple[Result, ...] = ()

    @property
    def is_over(self) -> bool:
        """True unless the command was interrupted meanwhile: then the stage runs again."""
        return self.state in ENDINGS

    def write(self, folder: Path) -> None:
        """Put it in place at once. Raises StoreError."""
        Store(str(folder)).write(record_path(folder, self.stage).name, self.model_dump_json(indent=1).encode())


def record_path(folder: Path, stage: str) -> Path:
    return folder / f"{file_name(stage)}.json"


def file_name(stage: str) -> str:
    """A stage's name as files have it."""
    return re.sub(r"[^a-z0-9]+", "-", stage.lower())


def read_record(folder: Path, stage: str) -> GPUStageRecord | None:
    """The record of a stage, if there is one. Raises UserError for another file in its place."""
    path = record_path(folder, stage)
    if not path.exists():
        return None
    try:
        return GPUStageRecord.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise UserError(f"{path}: no record of `python -m bench gpu --everything`; remove it") from error
