"""Where a text model runs on a device, told from its config, and why it is not faster there. Without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from swiftbatch.worker.kernels.sizes import HEAD_DIMS
from swiftbatch.worker.model.dense_config import SWITCHED_WINDOWS, OtherDecoderError, read_dense, refuse_other_tensors
from swiftbatch.worker.model.kinds import RECURRENT

PathName = Literal["kernels", "kernels attend", "transformers"]
# kinds whose windows stand in `sliding_window` alone
NUMBERED_WINDOWS = ("cohere2", "ministral3", "mistral", "mixtral", "phi3", "phimoe", "starcoder2")
OTHER_ATTENTION = ("gpt_oss", "llama4_text")  # with sinks, and in chunks
ALL_ATTENTION = {"attention", "full_attention", RECURRENT}  # the latter have a state in place of keys and values


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
        can_attend = device == "cpu" and _attends_plainly(config)
        return ComputePath("kernels attend" if can_attend else "transformers", str(error))


def _attends_plainly(config: dict[str, Any]) -> bool:
    """Tell whether all layers attend to all positions, with heads that the kernels take and nothing beside."""
    kind = config.get("model_type")
    if config.get("attn_logit_softcapping") or kind in OTHER_ATTENTION:
        return False
    is_windowed = bool(set(config.get("layer_types") or ()) - ALL_ATTENTION)
    if kind in NUMBERED_WINDOWS:
        is_windowed |= config.get("sliding_window") is not None or "sliding_window" not in config
    if kind in SWITCHED_WINDOWS:
        is_windowed |= bool(config.get("use_sliding_window"))
    return not is_windowed and _head_dim(config) in HEAD_DIMS


def _head_dim(config: dict[str, Any]) -> int:
    if "qk_nope_head_dim" in config:
        return int(max(config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"]))
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
