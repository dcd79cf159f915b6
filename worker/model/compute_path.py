"""The path that a text model takes on a device, told from its config, and why it is not faster. Without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from swiftbatch.worker.kernels.kernel_sizes import HEAD_DIMS
from swiftbatch.worker.model.decoder_config import OtherDecoderError, read_decoder_config, refuse_other_tensors
from swiftbatch.worker.model.formats.catalogue import CONFIG_KEYS
from swiftbatch.worker.model.layer_types import RECURRENT, STATELESS, layer_types

PathName = Literal["kernels", "kernels attend", "transformers"]
LOADED_BY_OTHERS = ("llama", "mistral", "qwen2", "qwen3")  # kinds of `decoder_weights`
MOST_LAYERS = 1000
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
        dense = read_decoder_config(config)
        if stored is not None:
            refuse_other_tensors(dense, stored)
        return ComputePath("kernels")
    except OtherDecoderError as error:
        if device == "cpu" and _are_taken_over(config):
            return ComputePath("kernels")
        can_attend = device == "cpu" and _attends_in_kernels(config)
        return ComputePath("kernels attend" if can_attend else "transformers", str(error))


def _are_taken_over(config: dict[str, Any]) -> bool:
    """Tell whether the kernels take the layers once `transformers` has loaded them, and filled in its defaults.

    As whoever loads a model asks, on one without numbers: `transformers` takes seconds, and few models need it.
    """
    num_layers = config.get("num_hidden_layers")
    if config.get("model_type") not in LOADED_BY_OTHERS or not isinstance(num_layers, int) or num_layers > MOST_LAYERS:
        return False
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    from swiftbatch.worker.kernels.decoder_weights import decoder_weights

    try:
        said = AutoConfig.for_model(**{key: each for key, each in config.items() if key not in CONFIG_KEYS})
        with torch.device("meta"):
            model = MODEL_FOR_CAUSAL_LM_MAPPING[type(said)]._from_config(said, dtype=torch.bfloat16)
        model.model.rotary_emb = type(model.model.rotary_emb)(said)
        return decoder_weights(model) is not None
    except Exception:  # of any kind: a config's values reach code that never looked at them
        return False


def _attends_in_kernels(config: dict[str, Any]) -> bool:
    """Tell whether the kernels take all layers' heads and what these see."""
    if config.get("model_type") in CHUNKED or set(layer_types(config) or ()) - KNOWN_LAYERS:
        return False
    return _head_dim(config) in HEAD_DIMS


def _head_dim(config: dict[str, Any]) -> int:
    if "qk_nope_head_dim" in config:
        return int(max(config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"]))
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
