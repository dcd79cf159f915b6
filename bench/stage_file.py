"""The file of one stage: its figures, and all that they were made with, by which a later run knows them again."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

import swiftbatch
from swiftbatch.jobs.json_records import Frozen
from swiftbatch.worker.bench_texts import BenchError, read_text
from swiftbatch.worker.decode_bench import BenchOptions
from swiftbatch.worker.kernels.instruction_sets import chosen_variant

PATHS = {"json_path", "plot_path", "text", "model"}  # options that say where, and not what


class MadeWith(Frozen):
    """All that figures depend on: machine, text, model, code and options. Figures with others are measured again."""

    options: dict[str, Any]
    text: str  # SHA-256
    weights: str  # the model's fingerprint
    code: str  # SHA-256 of the package
    machine: dict[str, Any]
    versions: dict[str, str]

    def differences(self, other: MadeWith) -> list[str]:
        """The names of what is not the same."""
        return [name for name in type(self).model_fields if getattr(self, name) != getattr(other, name)]


class StageFile(Frozen):
    """The figures of one stage, as its benchmark writes them."""

    stage: str
    date: str  # of their end, as 2026-11-25
    seconds: float
    is_small: bool  # measured on too few tokens for figures to keep
    made_with: MadeWith
    figures: dict[str, Any]

    def write(self, path: Path) -> None:
        """Write the file at once: it is whole at any moment. Raises BenchError."""
        write_whole(path, self.model_dump_json(indent=1) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a text aside, and put it in place at once. Raises BenchError."""
    aside = path.with_name(f"{path.name}.part")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        raise BenchError(
            f"{path}: cannot be written: {error.strerror}; free the place and give the command again"
        ) from error


def read_stage_file(path: Path) -> StageFile:
    """Read the file of the stage that its name tells. Raises BenchError where it is no such file."""
    try:
        found = StageFile.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise BenchError(f"{path}: no figures of `python -m bench all`") from error
    if found.stage != path.stem:
        raise BenchError(f"{path}: figures of the stage {found.stage}")
    return found


def known(path: Path, made_with: MadeWith, report: Callable[[str], None]) -> StageFile | None:
    """The figures that are there already; `report` gets a line where there is a file that cannot be used."""
    if not path.exists():
        return None
    try:
        found = read_stage_file(path)
    except BenchError as error:
        report(f"{error}; the stage is measured again")
        return None
    if differences := found.made_with.differences(made_with):
        report(f"{path}: measured with other {', '.join(differences)}; the stage is measured again")
        return None
    return found


def made_with(options: BenchOptions, text_sha256: str, weights: str, code: str) -> MadeWith:
    """Describe this process and what a stage is asked for."""
    cores = len(os.sched_getaffinity(0))
    machine = {"cpu": cpu_name(), "cores": cores, "instructions": chosen_variant() or "none"}
    versions = {"swiftbatch": swiftbatch.__version__, "torch": torch.__version__}
    asked = options.model_dump(mode="json", exclude=PATHS)
    return MadeWith(options=asked, text=text_sha256, weights=weights, code=code, machine=machine, versions=versions)


def sha256_of(text: Path) -> str:
    """SHA-256 of what a benchmark reads in a text file. Raises BenchError."""
    return hashlib.sha256(read_text(text).encode()).hexdigest()


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's own name, or its kind where the system does not tell."""
    try:
        found = re.search(r"^model name\s*: (.*)$", cpuinfo.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.machine()
