"""The tensors of a GGUF file as its head describes them, by their names in `transformers`. Without torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from swiftbatch.worker.model.gguf.gguf_model import FREQUENCIES, transformers_name
from swiftbatch.worker.model.gguf.header import read_head
from swiftbatch.worker.model.gguf.links import architecture_of

Form = tuple[str, tuple[int, ...]]  # what numbers are stored as, and how many in each dimension


def forms_in_gguf(file: Path) -> Iterator[tuple[str, Form]]:
    """The tensors of a file that a folder links to, each expert on its own. Raises GGUFError."""
    for tensor in read_head(file).tensors:
        if tensor.name == FREQUENCIES:
            continue
        name = transformers_name(tensor.name, architecture_of(file))
        if "*" not in name:
            yield name, (tensor.type.name, tensor.shape)
            continue
        for number in range(tensor.shape[0]):
            yield name.replace("*", str(number)), (tensor.type.name, tensor.shape[1:])
