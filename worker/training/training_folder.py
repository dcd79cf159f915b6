"""Folder of one training: its identity, its state after a kill, and its log."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.training.feature_file import differing


class Stateful(Protocol):
    """An optimizer, or several optimizers as one."""

    def state_dict(self) -> Any:
        """Return everything that the next step depends on, except the model's parameters."""

    def load_state_dict(self, state: Any) -> Any:
        """Restore such a state."""


@dataclass(frozen=True)
class TrainingFiles:
    """File names of one kind of training."""

    log: str
    state: str
    product: str  # a file that exists only when the training is finished


class TrainingFolder:
    """Folder of one training; the log's first record identifies it."""

    def __init__(self, path: Path, files: TrainingFiles, identity: dict[str, Any]) -> None:
        self.path, self._files = path, files
        self._identity = json.loads(json.dumps(identity))

    def is_finished(self, report: Callable[[str], None] = lambda line: None) -> bool:
        """Return whether this training is over, and `report` it if so. Raises ModelError for another training."""
        if is_finished := self._is_finished():
            report(f"{self.path}: holds this training, finished; nothing to do")
        return is_finished

    def _is_finished(self) -> bool:
        log, state, product = self._files.log, self._files.state, self._files.product
        has_state = (self.path / state).is_file()
        if not has_state and not _is_whole(self.path / product):
            return False
        found = next(iter(self.records()), {})
        if differences := differing(found, self._identity):
            what = "; ".join(differences) if found else f"no {log} tells how its {product} was trained"
            raise ModelError(
                f"output {self.path}: holds another training: {what}; name another folder, or delete {product} "
                f"and {state} there"
            )
        return not has_state

    def records(self) -> list[dict[str, Any]]:
        """Return all whole records of the log. Raises ModelError for other content."""
        path = self.path / self._files.log
        text = path.read_bytes().decode(errors="replace") if path.is_file() else ""
        lines = text.splitlines(keepends=True)
        try:
            return [dict(json.loads(line)) for line in lines if line.endswith("\n")]
        except (ValueError, TypeError) as error:
            raise ModelError(
                f"{path}: no log of a training ({error}); delete it to train from the beginning"
            ) from error

    def open_log(self, step: int) -> IO[str]:
        """Open the log for appending, cut to the records up to `step`."""
        kept = [record for record in self.records() if 0 <= record.get("step", 0) <= step] if step else []
        kept = [record for record in kept if record.get("when") != "after"] or [self._identity]
        self.path.mkdir(parents=True, exist_ok=True)
        aside = self.path / f".{self._files.log}"
        aside.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        os.replace(aside, self.path / self._files.log)
        return (self.path / self._files.log).open("a", encoding="utf-8")

    def save(self, model: torch.nn.Module, optimizer: Stateful, step: int, seconds: float) -> None:
        """Write all that the next steps depend on, atomically."""
        parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "seconds": seconds}
        aside = self.path / f".{self._files.state}"
        torch.save(parts, aside)
        os.replace(aside, self.path / self._files.state)

    def restore(self, model: torch.nn.Module, optimizer: Stateful) -> tuple[int, float]:
        """Load the state if there is one; return its number of steps and seconds, or zeros without a state."""
        path = self.path / self._files.state
        if not path.is_file():
            return 0, 0.0
        try:
            parts = torch.load(path, map_location="cpu", weights_only=True)
            model.load_state_dict(parts["model"])
            optimizer.load_state_dict(parts["optimizer"])
            return int(parts["step"]), float(parts["seconds"])
        except (RuntimeError, OSError, EOFError, KeyError, ValueError, pickle.UnpicklingError) as error:
            problem = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ModelError(f"{path}: cannot be read ({problem}); delete it to train from the beginning") from error

    def finish(self) -> None:
        (self.path / self._files.state).unlink(missing_ok=True)


def _is_whole(product: Path) -> bool:
    """Return whether the weights are complete."""
    try:
        with safe_open(product, framework="pt"):
            return True
    except (OSError, SafetensorError):
        return False


def write_record(log: IO[str], record: Any) -> None:
    log.write(json.dumps(asdict(record)) + "\n")
    log.flush()


def write_measured(log: IO[str], records: Iterable[Any], report: Callable[[str], None]) -> None:
    for record in records:
        write_record(log, record)
        report(record.in_words())
