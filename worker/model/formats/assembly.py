"""Puts matrices together from their parts as they are read, and lets the parts go."""

from __future__ import annotations

import torch
from torch import Tensor

from swiftbatch.worker.kernels.packed import Weight
from swiftbatch.worker.model.formats.contract import FormatError
from swiftbatch.worker.model.formats.layout import Layout, PackedTensor


class Assembly:
    """Takes the tensors of a model's files in any order, and gives back the weights of its text model."""

    def __init__(self, layout: Layout, dtype: torch.dtype) -> None:
        self._names, self.dtype = layout.names, dtype
        self._places = {stored: (each, part) for each in layout.packed for part, stored in each.parts.items()}
        self._parts: dict[str, dict[str, Tensor]] = {}

    def take(self, stored: str, tensor: Tensor) -> tuple[str, Weight] | None:
        """The weight that is whole with this tensor, and its name; None where parts are to come, or for no weight.

        Raises FormatError for parts that are damaged.
        """
        if stored in self._names:
            return self._names[stored], tensor
        if stored not in self._places:
            return None
        matrix, part = self._places[stored]
        parts = self._parts.setdefault(matrix.name, {})
        parts[part] = tensor
        return None if len(parts) < len(matrix.parts) else (matrix.name, self._whole(matrix))

    def _whole(self, matrix: PackedTensor) -> Weight:
        try:
            return matrix.scheme.weight(self._parts.pop(matrix.name), self.dtype)
        except FormatError as error:
            raise FormatError(f"{matrix.name}: {error}") from None
