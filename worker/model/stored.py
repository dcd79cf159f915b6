"""What the head of a file of weights says of its tensors. Without torch: the driver asks, too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open

from swiftbatch.worker.model.gguf.gguf_model import FREQUENCIES, transformers_name
from swiftbatch.worker.model.gguf.header import read_head
from swiftbatch.worker.model.gguf.links import SUFFIX, architecture_of

Form = tuple[str, tuple[int, ...]]  # what numbers are stored as, and how many in each dimension


def forms_in(file: Path) -> dict[str, Form]:
    """The tensors of a file by their names in `transformers`. Raises as `safe_open` does, GGUFError for a GGUF file."""
    if file.suffix == SUFFIX:
        return dict(_forms_in_gguf(file))
    with safe_open(file, framework="numpy") as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 (no mapping)
        return {name: (str(each.get_dtype()), tuple(each.get_shape())) for name, each in slices.items()}


def shapes_in(file: Path) -> dict[str, tuple[int, ...]]:
    """As `forms_in`, without what numbers are stored as."""
    return {name: shape for name, (_, shape) in forms_in(file).items()}


def _forms_in_gguf(file: Path) -> Iterator[tuple[str, Form]]:
    """The tensors of a file that a folder links to, each expert on its own."""
    for tensor in read_head(file).tensors:
        if tensor.name == FREQUENCIES:
            continue
        name = transformers_name(tensor.name, architecture_of(file))
        if "*" not in name:
            yield name, (tensor.type.name, tensor.shape)
            continue
        for number in range(tensor.shape[0]):
            yield name.replace("*", str(number)), (tensor.type.name, tensor.shape[1:])
