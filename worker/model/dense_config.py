"""What our kernels need to know of a dense decoder, read from its config alone, and what keeps them from it.

Only a config that says nothing but what is understood here; any other goes through `transformers`. Without torch: the
driver asks, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from swiftbatch.worker.kernels.frequencies import Rotary, rotary_of
from swiftbatch.worker.kernels.sizes import sizes_fault
from swiftbatch.worker.model.kinds import KERNELS_LACK
from swiftbatch.worker.model.text_view import EMBEDDING, HEAD

FINAL_NORM = "model.norm.weight"
KINDS = ("llama", "mistral", "phi3", "qwen2", "qwen3", "seed_oss")
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
    "partial_rotary_factor": (1, 1.0),
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
    "attention_out_bias",
    "chunk_size_feed_forward",
    "embd_pdrop",
    "initializer_range",
    "layer_types",
    "max_position_embeddings",
    "max_window_layers",
    "mlp_bias",
    "num_nextn_predict_layers",
    "original_max_position_embeddings",  # beside angles that are stretched, which say it again
    "resid_pdrop",
    "residual_dropout",
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
FUSED = {  # of Phi-3: linear layers that are stored as one, rows of one behind those of the other
    "self_attn.qkv_proj": ("query", "key", "value"),
    "mlp.gate_up_proj": ("gate", "up"),
}
HEAD_NORMS = {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}  # of Qwen3


@dataclass(frozen=True)
class DenseConfig:
    """The sizes of a dense decoder, its rotation, and what its layers store."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    epsilon: float
    rotary: Rotary
    is_tied: bool
    parts: tuple[str, ...]  # the tensors of a layer, no more and no less

    @property
    def widths(self) -> dict[str, int]:
        """Rows of the linear layers that some kinds store as one."""
        keys = self.num_kv_heads * self.head_dim
        heads = {"query": self.num_heads * self.head_dim, "key": keys, "value": keys}
        return heads | {"gate": self.intermediate, "up": self.intermediate}

    def tensor_names(self) -> set[str]:
        """The names of all tensors."""
        names = {f"model.layers.{number}.{part}" for number in range(self.num_layers) for part in self.parts}
        return names | {EMBEDDING, FINAL_NORM, *(() if self.is_tied else (HEAD,))}


class OtherDecoderError(ValueError):
    """A decoder that the kernels do not take; its text says why, in words for the user."""


def read_dense(config: dict[str, Any]) -> DenseConfig:
    """Read a text model's config. Raises OtherDecoderError for one that is left to `transformers`."""
    if lack := _other_form(config):
        raise OtherDecoderError(lack)
    try:
        return _read(config)
    except (KeyError, TypeError, ValueError) as error:
        reason = f"{error.args[0]} is left to a default" if isinstance(error, KeyError) else str(error)
        raise OtherDecoderError(reason) from None


def refuse_other_tensors(dense: DenseConfig, stored: set[str]) -> None:
    """Raise OtherDecoderError where a model stores other tensors than those of its config."""
    if dense.num_layers > len(stored):
        raise OtherDecoderError(f"it stores {len(stored)} tensors, fewer than its {dense.num_layers:,} layers")
    if different := sorted(dense.tensor_names() ^ stored):
        raise OtherDecoderError(f"its tensors are others, {different[0]} among them")


def _read(config: dict[str, Any]) -> DenseConfig:
    """Raises KeyError or ValueError for numbers left to a default, or that the kernels do not take."""
    head_dim = _head_dim(config)
    if not isinstance(config["rms_norm_eps"], float):
        raise ValueError(f"its rms_norm_eps is {config['rms_norm_eps']!r}")
    sizes = {
        "num_layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"],
        "head_dim": head_dim,
        "intermediate": config["intermediate_size"],
        "vocab": config["vocab_size"],
    }
    if fault := sizes_fault(**sizes):
        raise ValueError(fault)
    return DenseConfig(
        **sizes,
        epsilon=config["rms_norm_eps"],
        rotary=_rotary(config),
        is_tied=_is_tied(config),
        parts=tuple(_parts(config)),
    )


def _other_form(config: dict[str, Any]) -> str | None:
    """Say what of a layer's form the kernels do not have; None for one that they have."""
    kind = config.get("model_type")
    if kind not in KINDS:
        return KERNELS_LACK.get(str(kind), "its layers are of another form")
    if windows := set(map(str, config.get("layer_types") or ())) - {"full_attention"}:
        return f"its layers have {', '.join(sorted(windows))}"
    said = {key: value for key, value in config.items() if key in ONE_MEANING and not _is_unused(key, config)}
    for key, value in said.items():
        if value not in ONE_MEANING[key]:
            return f"its {key} is {value!r}"
    if kind == "mistral" and "sliding_window" not in config:
        return "its sliding_window is left to a default"
    if "hidden_act" not in config:
        return "its hidden_act is left to a default"
    unknown = sorted(key for key, value in config.items() if _may_matter(key, value))
    return f"its config has {unknown[0]}, which may change a layer" if unknown else None


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


def _parts(config: dict[str, Any]) -> list[str]:
    """The tensors of a layer."""
    fused = {role: part for part, roles in FUSED.items() for role in roles} if config["model_type"] == "phi3" else {}
    linears = dict.fromkeys(fused.get(role, part) for role, part in LINEARS.items())
    parts = [f"{part}.weight" for part in (*NORMS.values(), *linears)]
    parts += [f"{LINEARS[role]}.bias" for role in _biased(config)]
    return parts + [f"{part}.weight" for part in HEAD_NORMS.values() if config["model_type"] == "qwen3"]


def _biased(config: dict[str, Any]) -> list[str]:
    """The linear layers that have a bias."""
    kind = config["model_type"]
    if kind == "qwen2":
        return ["query", "key", "value"]
    in_attention = kind in ("llama", "qwen3", "seed_oss") and bool(config.get("attention_bias", False))
    at_its_end = bool(config.get("attention_out_bias", False)) if kind == "seed_oss" else in_attention
    in_mlp = kind in ("llama", "seed_oss") and bool(config.get("mlp_bias", False))
    return ["query", "key", "value"] * in_attention + ["output"] * at_its_end + ["gate", "up", "down"] * in_mlp
