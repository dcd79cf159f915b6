"""Reads and checks an engine's trained part."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.drafters.catalogue import TrainedPart
from swiftbatch.worker.forward.target_model import TargetModel

Shape = tuple[int | str, ...]  # a name stands for any number above 0


@dataclass(frozen=True)
class ReadPart:
    header: dict[str, str]
    tensors: dict[str, torch.Tensor]
    where: str  # begins every message
    advice: str  # ends every message

    def fault(self, reason: str) -> ModelError:
        return ModelError(f"{self.where}: {reason}; {self.advice}")

    def checked(self, shapes: dict[str, Shape]) -> dict[str, torch.Tensor]:
        """Return the tensors. Raises ModelError unless names, shapes and finite floats are as expected."""
        for name, shape in shapes.items():
            expected = f"expected floats [{', '.join(map(str, shape))}]"
            if name not in self.tensors:
                raise self.fault(f"`{name}` is missing; {expected}")
            found = self.tensors[name]
            if not found.is_floating_point() or not _fits(found.shape, shape):
                raise self.fault(f"`{name}` is {found.dtype} {list(found.shape)}; {expected}")
            if not found.isfinite().all():
                raise self.fault(f"`{name}` has values that are not finite")
        if unknown := self.tensors.keys() - shapes.keys():
            raise self.fault(f"unknown tensors {', '.join(sorted(unknown))}")
        return self.tensors


def read_part(part: TrainedPart, target: TargetModel, parts_folder: Path | None) -> ReadPart:
    """Read a part's file. Raises ModelError if it is missing, damaged, or another model's."""
    files = target.files
    path = part.find(files.name, files.path, files.fingerprint, parts_folder)
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        return ReadPart(file.metadata(), tensors, f"engine {part.engine}: {path}", part.advice(files.name))


def _fits(found: torch.Size, shape: Shape) -> bool:
    if len(found) != len(shape):
        return False
    pairs = zip(found, shape, strict=True)
    return all(size > 0 if isinstance(wanted, str) else size == wanted for size, wanted in pairs)
