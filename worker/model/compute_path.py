"""The path that a text model takes on a device, told from its config, and why it is not faster. Without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from swiftbatch.worker.kernels.kernel_sizes import HEAD_DIMS
from swiftbatch.worker.model.dense_config import (
    OtherDecoderError,
    read_dense,
    refuse_other_tensors,
)
from swiftbatch.worker.model.recurrent_sizes import RECURRENT, STATELESS, layer_types

PathName = Literal["kernels", "kernels attend", "transformers"]
CHUNKED = ("llama4_text",)  # kinds that attend in chunks, whatever their config says of layers
KNOWN_LAYERS = {"attention", "full_attention", "sliding_attention", "*"} | RECURRENT | STATELESS


@dataclass(frozen=True)
class ComputePath:
    """Our kernels for all of a forward, for its attention alone, or the layers of `transformers`; and why no more."""

    name: PathName
    reason: str | None = None


def path_on(device: Literal["cpu", "cuda"], config: dict[str, Any], stored: set[str] | None = None) -> ComputePath:
    """Tell the path of a text model that runs here. `stored` are the names of its tensors, where they are known."""
    try:
        dense = read_dense(config)
        if stored is not None:
            refuse_other_tensors(dense, stored)
        return ComputePath("kernels")
    except OtherDecoderError as error:
        can_attend = device == "cpu" and _attends_in_kernels(config)
        return ComputePath("kernels attend" if can_attend else "transformers", str(error))


def _attends_in_kernels(config: dict[str, Any]) -> bool:
    """Tell whether the kernels take all layers' heads and what these see."""
    if config.get("model_type") in CHUNKED or set(layer_types(config) or ()) - KNOWN_LAYERS:
        return False
    return _head_dim(config) in HEAD_DIMS


def _head_dim(config: dict[str, Any]) -> int:
    if "qk_nope_head_dim" in config:
        return int(max(config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"]))
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
