"""The weights of a GGUF file, read and hashed in one pass."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from io import RawIOBase
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from swiftbatch.worker.kernels.quantized_weights import PackedMatrix, Weight
from swiftbatch.worker.model.architectures.spec import GGUFSpec
from swiftbatch.worker.model.digests import Hashing, exactly, fill
from swiftbatch.worker.model.gguf.blocks import packed_from
from swiftbatch.worker.model.gguf.gguf_model import FREQUENCIES, form_of_link, num_experts_in, transformers_name
from swiftbatch.worker.model.gguf.header import GGUFError, TensorHead, read_head

NUMBERS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PAIRED = {".q_proj.": "num_attention_heads", ".k_proj.": "num_key_value_heads"}  # key of the number of heads of each
RAISED = "norm.weight"
SHARED_GATE = "shared_expert_gate.weight"  # stored as a vector instead of a matrix with one row

PIECE = 1 << 24  # bytes per read between tensors


def gguf_weights(
    file: Path, stream: RawIOBase, hashing: Hashing, config: dict[str, Any], dtype: torch.dtype
) -> Iterator[tuple[str, Weight]]:
    """Yield a linked file's weights by `transformers`' names. Raises ValueError for a damaged file."""
    head, form = read_head(file), form_of_link(file)
    if hashlib.sha256(_taken(stream, head.num_bytes, hashing)).hexdigest() != head.sha256:
        raise GGUFError("it has changed while it was read")
    place = 0
    for tensor in head.tensors:
        _pass_over(stream, tensor.offset - place, hashing)
        data = torch.empty(tensor.num_bytes, dtype=torch.uint8)
        room = memoryview(cast(Any, data.numpy()))
        fill(stream, room)
        hashing.take(room)
        place = tensor.offset + tensor.num_bytes
        if tensor.name != FREQUENCIES:
            name = transformers_name(tensor.name, form)
            yield from weights_of(name, tensor, data, form, config, dtype)
    _pass_over(stream, os.fstat(stream.fileno()).st_size - head.num_bytes - place, hashing)


def _taken(stream: RawIOBase, size: int, hashing: Hashing) -> bytes:
    data = exactly(stream, size)
    hashing.take(data)
    return data


def _pass_over(stream: RawIOBase, size: int, hashing: Hashing) -> None:
    while size > 0:
        size -= len(_taken(stream, min(size, PIECE), hashing))


def weights_of(
    name: str, tensor: TensorHead, data: Tensor, form: GGUFSpec, config: dict[str, Any], dtype: torch.dtype
) -> Iterator[tuple[str, Weight]]:
    """Yield a stored tensor's weights: one, or one for each expert. Raises GGUFError.

    Undoes what llama.cpp changes: paired rows of queries and keys, and norms with 1 added.
    """
    if "*" in name:
        for number, one in enumerate(data.view(num_experts_in(tensor), -1)):
            yield name.replace("*", str(number)), _weight(tensor, one, tensor.shape[1:], dtype)
        return
    shape = (1, *tensor.shape) if name.endswith(SHARED_GATE) and len(tensor.shape) == 1 else tensor.shape
    weight = _weight(tensor, data, shape, dtype)
    if form.has_raised_norms and name.endswith(RAISED):
        weight = _numbers(weight) - 1
    for part, key in PAIRED.items():
        if form.has_paired_heads and part in name:
            weight = _apart(weight, config[key], tensor.name)
    yield name, weight


def _weight(tensor: TensorHead, data: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Weight:
    """Return a quantized matrix packed, and any other tensor dequantized."""
    if tensor.type.name in NUMBERS:
        return data.view(NUMBERS[tensor.type.name]).view(shape)
    num_rows = shape[0] if len(shape) == 2 else 1
    try:
        packed = packed_from(tensor.type.name, data.view(-1, tensor.type.num_bytes), num_rows, dtype)
    except ValueError as error:
        raise GGUFError(f"its tensor {tensor.name} of {tensor.type.name} can't be unpacked: {error}") from None
    return packed if len(shape) == 2 else packed.dequantized().view(shape)


def _numbers(weight: Weight) -> Tensor:
    return (weight.dequantized() if isinstance(weight, PackedMatrix) else weight).float()


def _apart(weight: Weight, num_heads: int, name: str) -> Weight:
    """Separate the halves of each head, whose rows alternate in the file."""
    num_rows = weight.shape[0]
    if num_rows % (2 * num_heads):
        raise GGUFError(f"its tensor {name} has {num_rows:,} rows for {num_heads} heads")
    order = torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).flatten()
    return weight.rows(order) if isinstance(weight, PackedMatrix) else weight[order]
