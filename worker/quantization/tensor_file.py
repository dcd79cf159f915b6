"""Writes a safetensors file tensor by tensor, so that a single one is in memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from swiftbatch.worker.model.formats.contract import ITEM_BITS, StoredTensor


def write_tensors(file: Path, heads: Mapping[str, StoredTensor], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write tensors as they come, each at its place. Raises ValueError for one that is not as its head says."""
    header, places, end = dict[str, Any]({"__metadata__": {"format": "pt"}}), dict[str, int](), 0
    for name, head in sorted(heads.items(), key=_alignment):
        header[name] = {"dtype": head.dtype, "shape": list(head.shape), "data_offsets": [end, end + head.num_bytes]}
        places[name], end = end, end + head.num_bytes
    words = json.dumps(header).encode()
    words += b" " * (-len(words) % 8)
    with file.open("xb") as stream:
        stream.write(len(words).to_bytes(8, "little") + words)
        start = stream.tell()
        for name, tensor in tensors:
            head = heads[name]
            if (tuple(tensor.shape), tensor.nbytes) != (head.shape, head.num_bytes):
                raise ValueError(f"found {name} {list(tensor.shape)}, expected {list(head.shape)}")
            stream.seek(start + places.pop(name))
            stream.write(memoryview(cast(Any, tensor.contiguous().view(-1).view(torch.uint8).numpy())))
    if places:
        raise ValueError(f"found no {min(places)}")


def _alignment(head: tuple[str, StoredTensor]) -> tuple[int, str]:
    """Wide numbers first, as the library has it: each then begins at a multiple of its size."""
    return -ITEM_BITS.get(head[1].dtype, 8), head[0]
