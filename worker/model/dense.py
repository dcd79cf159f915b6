"""Dense decoders straight from their files: Llama, Mistral, Qwen2, Qwen3 need no `transformers`, which takes seconds.

Only a config that says nothing but what is understood here; any other goes through `transformers`.
"""

from __future__ import annotations

from typing import Any

import torch
from safetensors import safe_open

from swiftbatch.worker.kernels.angles import Rotary, rotary_of
from swiftbatch.worker.kernels.decoder_weights import DecoderSizes, DecoderWeights, LayerWeights, Linear
from swiftbatch.worker.model.digests import weight_files
from swiftbatch.worker.model.files import ModelFiles, read_config
from swiftbatch.worker.model.tensors import read_tensors
from swiftbatch.worker.model.text_view import EMBEDDING, HEAD, text_name

KINDS = ("llama", "mistral", "qwen2", "qwen3")
SWITCHED_WINDOWS = ("qwen2", "qwen3")  # whose window is not in use unless `use_sliding_window` says so
SIZES = {
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "rms_norm_eps",
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
    "tie_word_embeddings",
}
ONE_MEANING: dict[str, tuple[Any, ...]] = {  # a key that changes the forward, and the values with which it does not
    "hidden_act": ("silu",),
    "pretraining_tp": (1,),
    "sliding_window": (None,),  # where it is in use
    "use_sliding_window": (False,),
    "use_mrope": (False,),
    "is_causal": (True,),
}
GENERATING = {  # numbers that older versions of `transformers` wrote into every config
    "diversity_penalty",
    "encoder_no_repeat_ngram_size",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "repetition_penalty",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
}
SAID_ELSEWHERE = {  # numbers of training, of generation, of towers beside the text, or said by the weights themselves
    "attention_bias",
    "attention_dropout",
    "chunk_size_feed_forward",
    "initializer_range",
    "layer_types",
    "max_position_embeddings",
    "max_window_layers",
    "mlp_bias",
    "num_nextn_predict_layers",
    *GENERATING,
}
NORMS = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
LINEARS = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
HEAD_NORMS = {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}  # of Qwen3


CPU = torch.device("cpu")


def dense_weights(files: ModelFiles, dtype: torch.dtype, device: torch.device = CPU) -> DecoderWeights | None:
    """The weights of a model folder; None for one that is not such a decoder, or whose tensors are not all there.

    Each tensor goes to the device as it is read: for another one than the CPU, the host holds one of them at a time.
    """
    config = read_config(files.name, files.path)
    if not _is_understood(config):
        return None
    try:
        sizes, rotary = _sizes(config, dtype), _rotary(config)
    except (KeyError, TypeError, ValueError):
        return None
    if sizes.num_layers > len(names := _stored_names(files, config)) or names != _names(config):
        return None
    # in this order: fewer bytes pass where files are the narrower
    tensors = read_tensors(files, lambda tensor: tensor.to(device).to(dtype))
    embedding = tensors[EMBEDDING]
    head = embedding if _is_tied(config) else tensors[HEAD]
    layers = [_layer(tensors, f"model.layers.{number}.") for number in range(sizes.num_layers)]
    return DecoderWeights(sizes, embedding, layers, tensors["model.norm.weight"], Linear(head), rotary)


def _is_understood(config: dict[str, Any]) -> bool:
    if config.get("model_type") not in KINDS or set(config.get("layer_types") or ()) - {"full_attention"}:
        return False
    said = {key: value for key, value in config.items() if key in ONE_MEANING and not _is_unused(key, config)}
    if any(value not in ONE_MEANING[key] for key, value in said.items()):
        return False
    said_by_default = config["model_type"] != "mistral" or "sliding_window" in config  # whose default is a window
    return said_by_default and "hidden_act" in config and not any(_may_matter(*item) for item in config.items())


def _may_matter(key: str, value: Any) -> bool:
    """Tell whether a key may be a number of a layer that is not understood here; words and switches are none.

    The classes of these kinds look at no other keys than those named above, so what is not a number is of somebody's
    tools.
    """
    if key in SIZES | set(ONE_MEANING) | SAID_ELSEWHERE or key.endswith(("_token_id", "_token_ids")):
        return False
    numbers = value if isinstance(value, list) else [value]
    return any(isinstance(each, int | float) and not isinstance(each, bool) for each in numbers)


def _is_tied(config: dict[str, Any]) -> bool:
    return bool(config.get("tie_word_embeddings", False))


def _is_unused(key: str, config: dict[str, Any]) -> bool:
    """Return whether a number stands there that no layer looks at: the window of a Qwen that has it switched off."""
    return key == "sliding_window" and config["model_type"] in SWITCHED_WINDOWS and isinstance(config[key], int)


def _sizes(config: dict[str, Any], dtype: torch.dtype) -> DecoderSizes:
    """Read the sizes. Raises KeyError or ValueError for those left to a default, or that the kernels do not take."""
    head_dim = _head_dim(config)
    if not isinstance(config["rms_norm_eps"], float):
        raise ValueError("transformers tells more of it")
    return DecoderSizes(
        num_layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=head_dim,
        intermediate=config["intermediate_size"],
        vocab=config["vocab_size"],
        epsilon=config["rms_norm_eps"],
        scale=head_dim**-0.5,
        dtype=dtype,
    )


def _head_dim(config: dict[str, Any]) -> int:
    """Read a head's width. Raises KeyError, TypeError or ValueError for none, or one left to another default."""
    head_dim = config.get("head_dim")
    if head_dim is None and config["model_type"] != "qwen3":
        head_dim = config["hidden_size"] // config["num_attention_heads"]
    if not isinstance(head_dim, int):
        raise ValueError("transformers tells more of it")
    return head_dim


def _rotary(config: dict[str, Any]) -> Rotary:
    """Read the angles. Raises KeyError, TypeError or ValueError for those left to a default, or none of ours."""
    said = config.get("rope_scaling") or config.get("rope_parameters") or {"rope_type": "default"}
    if "rope_theta" in config:
        said = {"rope_theta": config["rope_theta"]} | said
    return rotary_of(said, _head_dim(config), is_strict=True)


def _names(config: dict[str, Any]) -> set[str]:
    """The tensors of such a model, no more and no less."""
    parts = [f"{part}.weight" for part in (*NORMS.values(), *LINEARS.values())]
    parts += [f"{LINEARS[role]}.bias" for role in _biased(config)]
    parts += [f"{part}.weight" for part in HEAD_NORMS.values() if config["model_type"] == "qwen3"]
    names = {f"model.layers.{number}.{part}" for number in range(config["num_hidden_layers"]) for part in parts}
    return names | {EMBEDDING, "model.norm.weight", *(() if _is_tied(config) else (HEAD,))}


def _biased(config: dict[str, Any]) -> list[str]:
    """The linear layers that have a bias."""
    if config["model_type"] == "qwen2":
        return ["query", "key", "value"]
    attention = config["model_type"] in ("llama", "qwen3") and config.get("attention_bias", False)
    mlp = config["model_type"] == "llama" and config.get("mlp_bias", False)
    return ["query", "key", "value", "output"] * bool(attention) + ["gate", "up", "down"] * bool(mlp)


def _stored_names(files: ModelFiles, config: dict[str, Any]) -> set[str]:
    """The names of the tensors in a model's files; none where one is there twice, as nobody says which of two it is."""
    opened: list[Any] = [safe_open(file, framework="pt") for file in weight_files(files.path)]
    stored = (text_name(name, config) for file in opened for name in file.keys())  # noqa: SIM118 (no mapping)
    names = [name for name in stored if name is not None and not (name == HEAD and _is_tied(config))]
    return set(names) if len(set(names)) == len(names) else set()


def _layer(tensors: dict[str, torch.Tensor], prefix: str) -> LayerWeights:
    linears = {
        role: Linear(tensors[f"{prefix}{part}.weight"], tensors.get(f"{prefix}{part}.bias"))
        for role, part in LINEARS.items()
    }
    norms = {role: tensors[f"{prefix}{part}.weight"] for role, part in NORMS.items()}
    head_norms = {role: tensors.get(f"{prefix}{part}.weight") for role, part in HEAD_NORMS.items()}
    return LayerWeights(**linears, **norms, **head_norms)  # type: ignore[arg-type]
