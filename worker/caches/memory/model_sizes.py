"""The sizes that decide how much of a GPU a model takes. Without torch: they are known before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiftbatch.worker.caches.room import ITEM_SIZES, bytes_per_position
from swiftbatch.worker.model.files import ModelFiles, read_config, stored_layout
from swiftbatch.worker.model.formats.layout import heads_in
from swiftbatch.worker.model.text_view import is_of_text


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
        """What the weights take on the device: all of them in the run's dtype, quantized ones as well."""
        return self.num_parameters * self.item_size


def read_sizes(files: ModelFiles, dtype: str) -> ModelSizes | None:
    """The sizes of a model folder, from its config and the heads of its weights; None where its config hides some.

    A tied head counts once, as on the device.
    """
    config, heads = read_config(files.name, files.path), stored_layout(files.name, files.path).heads
    return sizes_of(config, sum(each.num_numbers for name, each in heads.items() if is_of_text(name, config)), dtype)


def sizes_of(config: dict[str, Any], number: int, dtype: str) -> ModelSizes | None:
    """The sizes of a text model with so many parameters; None where its config hides some."""
    num_bytes = bytes_per_position(config, dtype)
    num_heads, hidden, intermediate = (
        config.get(key) for key in ("num_attention_heads", "hidden_size", "intermediate_size")
    )
    if num_bytes is None or not (num_heads and hidden and intermediate):
        return None
    return ModelSizes(
        num_parameters=number,
        bytes_per_position=num_bytes,
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or hidden // num_heads,
        hidden=hidden,
        intermediate=intermediate,
        vocab=config["vocab_size"],
        item_size=ITEM_SIZES[dtype],
    )


def num_parameters(files: list[Path]) -> int:
    """Numbers in the tensors of these files."""
    return sum(head.num_numbers for file in files for head in heads_in(file).values())
