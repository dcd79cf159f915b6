"""The sizes that decide how much of a GPU a model takes. Without torch: they are known before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from swiftbatch.worker.caches.room import ITEM_SIZES, bytes_per_position
from swiftbatch.worker.model.digests import weight_files
from swiftbatch.worker.model.files import ModelFiles, read_config


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a decoder in the dtype that it runs in."""

    num_parameters: int
    bytes_per_position: int  # keys and values of one position in all layers
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int
    item_size: int  # bytes of a number

    @property
    def weight_bytes(self) -> int:
        return self.num_parameters * self.item_size


def read_sizes(files: ModelFiles, dtype: str) -> ModelSizes | None:
    """The sizes of a model folder, from its config and the heads of its weights; None where its config hides some."""
    config = read_config(files.name, files.path)
    num_bytes = bytes_per_position(files.path, dtype)
    num_heads, hidden, intermediate = (
        config.get(key) for key in ("num_attention_heads", "hidden_size", "intermediate_size")
    )
    if num_bytes is None or not (num_heads and hidden and intermediate):
        return None
    return ModelSizes(
        num_parameters=num_parameters(weight_files(files.path)),
        bytes_per_position=num_bytes,
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or hidden // num_heads,
        hidden=hidden,
        intermediate=intermediate,
        vocab=files.vocab_size,
        item_size=ITEM_SIZES[dtype],
    )


def num_parameters(files: list[Path]) -> int:
    """Numbers in the tensors of these files; a tied head is in them once, as on the device."""
    total = 0
    for file in files:
        with safe_open(file, framework="numpy") as tensors:
            total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return total
