"""Reads the weights of a GGUF file from the first byte to the last, all of which are hashed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from io import RawIOBase
from pathlib import Path
from typing import Any, cast

import torch

from swiftbatch.worker.kernels.packed import Weight
from swiftbatch.worker.model.gguf.gguf_model import FREQUENCIES, transformers_name
from swiftbatch.worker.model.gguf.header import GGUFError, read_head
from swiftbatch.worker.model.gguf.links import architecture_of
from swiftbatch.worker.model.gguf.weights import weights_of
from swiftbatch.worker.model.hashed_reading import Hashing, exactly, fill

PIECE = 1 << 24  # bytes, of those between tensors


def gguf_weights(
    file: Path, stream: RawIOBase, hashing: Hashing, config: dict[str, Any], dtype: torch.dtype
) -> Iterator[tuple[str, Weight]]:
    """The weights of a file that a folder links to, by their names in `transformers`, read from its stream.

    `config` is the model's. Raises ValueError for a damaged file, one that changes meanwhile, and one that is cut off.
    """
    head, architecture = read_head(file), architecture_of(file)
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
            name = transformers_name(tensor.name, architecture)
            yield from weights_of(name, tensor, data, architecture, config, dtype)
    _pass_over(stream, os.fstat(stream.fileno()).st_size - head.num_bytes - place, hashing)


def _taken(stream: RawIOBase, size: int, hashing: Hashing) -> bytes:
    data = exactly(stream, size)
    hashing.take(data)
    return data


def _pass_over(stream: RawIOBase, size: int, hashing: Hashing) -> None:
    while size > 0:
        size -= len(_taken(stream, min(size, PIECE), hashing))
