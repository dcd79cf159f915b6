"""Folder of one training: its lock, its identity, its state after a kill, and its log."""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.training.data_parallel import Report, is_first, meet
from swiftbatch.worker.training.training_plot import plot_training


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
    plot: str


class TrainingFolder:
    """Folder of one training; the log's first record identifies it."""

    def __init__(self, path: Path, files: TrainingFiles, identity: dict[str, Any]) -> None:
        self.path, self._files = path, files
        self._identity = json.loads(json.dumps(identity))

    def is_finished(self, report: Report) -> bool:
        """Return whether this training is over, and `report` it if so. Raises ModelError for another training."""
        log, state, product = self._files.log, self._files.state, self._files.product
        has_state = (self.path / state).is_file()
        is_begun = has_state or _is_whole(self.path / product)
        meet()  # before the first process writes
        if not is_begun:
            return False
        found = next(iter(self.records()), {})
        if differences := differing(found, self._identity):
            what = "; ".join(differences) if found else f"no {log} tells how its {product} was trained"
            raise ModelError(
                f"output {self.path}: holds another training: {what}; name another folder, or delete {product} "
                f"and {state} there"
            )
        if not has_state:
            report(f"{self.path}: holds this training, finished; nothing to do")
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

    def plot(self) -> None:
        plot_training(self.records(), self.path / self._files.plot)

    def finish(self) -> None:
        (self.path / self._files.state).unlink(missing_ok=True)


def _is_whole(product: Path) -> bool:
    try:
        with safe_open(product, framework="pt"):
            return True
    except (OSError, SafetensorError):
        return False


def write_record(log: IO[str], record: Any) -> None:
    log.write(json.dumps(record if isinstance(record, dict) else asdict(record)) + "\n")
    log.flush()


def write_measured(log: IO[str], records: Iterable[Any], report: Report) -> None:
    for record in records:
        write_record(log, record)
        report(record.in_words())


def differing(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Return the differences of two JSON objects in words, recursively."""
    said: list[str] = []
    for key in dict.fromkeys([*expected, *found]):
        one, other = found.get(key), expected.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            said += [f"{key}.{line}" for line in differing(one, other)]
        elif one != other:
            said.append(f"{key} is {_short(one)}, expected {_short(other)}")
    return said


def _short(value: object) -> str:
    return value[:12] if isinstance(value, str) else json.dumps(value)


LOCK = ".training.lock"  # the file names the process that has the lock, for error messages

_held: set[Path] = set()  # a training may be part of another training in this process


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Lock a folder within the block; remove a new one at the end if it is empty. Raises ModelError."""
    folder = Path(os.path.realpath(path))  # Path.resolve would raise for a link to itself
    if folder in _held or not is_first():
        yield
        return
    is_new = not os.path.exists(folder)  # Path.exists would raise for a name that is too long
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder / LOCK, path)
    except OSError as error:
        raise ModelError(f"output {path}: cannot be written ({error.strerror}); name another folder") from None
    _held.add(folder)
    try:
        yield
    finally:
        _held.remove(folder)
        (folder / LOCK).unlink(missing_ok=True)
        os.close(lock)
        if is_new:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


def _lock(file: Path, path: Path) -> int:
    """Create and lock the file; return its descriptor. Raises ModelError if another process holds it, OSError."""
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 1000).decode(errors="replace") or "one that is just starting"
            os.close(descriptor)
            raise ModelError(
                f"output {path}: another process is at work there, {holder}; wait for its end, end it, or name "
                "another folder"
            ) from None
        except OSError:
            pass  # without locks in the file system, every process may train
        if _is_at(file, descriptor):
            os.truncate(descriptor, 0)
            os.write(descriptor, _own_name().encode())
            return descriptor
        os.close(descriptor)  # the process that had the lock has ended, and has removed the file


def _own_name() -> str:
    since = datetime.now().astimezone().isoformat(" ", "seconds")
    return f"process {os.getpid()} on {socket.gethostname()} since {since}"


def _is_at(file: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(file), os.fstat(descriptor))
    except FileNotFoundError:
        return False
