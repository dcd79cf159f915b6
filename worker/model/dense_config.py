"""What our kernels need to know of a dense decoder, read from its config alone, and what keeps them from it.

Only a config that says nothing but what is understood here; any other goes through `transformers`. Without torch: the
driver asks, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from swiftbatch.worker.kernels.forms import Activation, NormForm
from swiftbatch.worker.kernels.frequencies import Rotary, rotary_of
from swiftbatch.worker.kernels.sizes import sizes_fault
from swiftbatch.worker.model.kinds import KERNELS_LACK
from swiftbatch.worker.model.layer_windows import (
    IS_WINDOWED,
    WindowForm,
    Windows,
    by_layer_types,
    by_layer_types_or_pattern,
    in_all_layers,
    in_all_layers_if_said,
    where_switched_on,
)
from swiftbatch.worker.model.text_view import EMBEDDING, HEAD

FINAL_NORM = "model.norm.weight"
ALWAYS = "always"  # in place of a key that says whether there are biases
IN_FRONT = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
BEHIND = {"output_norm": "post_attention_layernorm", "down_norm": "post_feedforward_layernorm"}
AROUND_PARTS = {"mlp_norm": "pre_feedforward_layernorm", "input_norm": "input_layernorm"} | BEHIND
AROUND = IN_FRONT | {"output_norm": "post_self_attn_layernorm", "down_norm": "post_mlp_layernorm"}
ACTIVATIONS = {
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu2": Activation.RELU2,
    "silu": Activation.SILU,
}


@dataclass(frozen=True)
class Form:
    """How a kind writes what all dense decoders have. Biases are there where the key that is named here says so."""

    query_key_value_bias: str | None = None
    output_bias: str | None = None
    mlp_bias: str | None = None
    has_head_norms: bool = False
    joins_heads: bool = False  # norms of queries and keys go over all heads of a row together
    norms_turned: bool = False  # they stand behind the rotation of each head
    norms: Mapping[str, str] = field(default_factory=lambda: IN_FRONT)  # their names, by what they norm
    norm_form: NormForm = NormForm.TWICE
    activations: Mapping[str, Activation] = field(default_factory=lambda: ACTIVATIONS)  # by the config's words
    has_gates: bool = True
    rounds_angles: bool = True  # cosines and sines, to the model's dtype
    activation_key: str = "hidden_act"
    scales_by_width: bool = False  # embeddings, by the root of their width, which is rounded to the model's dtype
    is_interleaved: bool = False  # neighbours are turned, in place of dimensions half a head apart; no head norms
    turned_share: float | None = None  # of a head, where the config does not say it; None: all of it, always
    names: Mapping[str, str] = field(default_factory=dict)  # that differ from those below; roles with one name are one
    scales: Mapping[str, str] = field(default_factory=dict)  # keys of numbers that multiply, by what they multiply
    has_still_layers: bool = False
    has_long_angles: bool = False  # longrope was tried on it
    windows: WindowForm | None = None  # None: all layers see all positions
    has_window_angles: bool = False  # layers with windows turn heads by angles of their own
    is_parallel: bool = False  # products read what attention reads
    intermediate_key: str = "intermediate_size"
    epsilon_key: str = "rms_norm_eps"
    one_meaning: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # beside `ONE_MEANING`
    unused: tuple[str, ...] = ()  # beginnings of keys of layers that it does not have here

    @property
    def linears(self) -> dict[str, str]:
        """The names of linear layers by their roles."""
        roles = (role for role in LINEARS if role != "gate" or self.has_gates)
        return {role: self.names.get(role, LINEARS[role]) for role in roles}

    @property
    def head_norms(self) -> dict[str, str]:
        """The names of norms of queries and keys by their roles."""
        return {role: self.names.get(role, part) for role, part in HEAD_NORMS.items() if self.has_head_norms}


FUSED_QUERIES = dict.fromkeys(("query", "key", "value"), "self_attn.qkv_proj")
FUSED_GATES = dict.fromkeys(("gate", "up"), "mlp.gate_up_proj")
SHARED_GATES = {**dict.fromkeys(("gate", "up"), "shared_mlp.input_linear"), "down": "shared_mlp.output_linear"}
GRANITE = {"scores": "attention_multiplier", "embedding": "embedding_multiplier", "residual": "residual_multiplier"}
GRANITE |= {"logits": "logits_scaling"}
IN_ALL = ("attention_bias", "attention_bias", "mlp_bias")
HUNYUAN_UNUSED = (
    *("anyres_", "attention_head_dim", "cla_share_factor", "class_num", "dense_list", "eod_token_id", "im_"),
    *("mask_init_id", "moe_", "num_experts", "num_media_embeds", "num_shared_expert", "org_vocab_size", "pad_id"),
    *("routed_scaling_factor", "sep_id", "text_", "video_", "vit_"),
)
KINDS = {
    "arcee": Form(*IN_ALL, has_gates=False),
    "cohere": Form(
        "attention_bias",
        "attention_bias",
        is_interleaved=True,
        norms={"input_norm": "input_layernorm"},
        norm_form=NormForm.CENTRED,
        is_parallel=True,
        epsilon_key="layer_norm_eps",
        scales={"logits_factor": "logit_scale"},
        one_meaning={"use_qk_norm": (False, None)},
        unused=("model_max_length",),
    ),
    "ernie4_5": Form("use_bias", "use_bias", "use_bias", is_interleaved=True),
    "cwm": Form(mlp_bias="mlp_bias", windows=by_layer_types),
    "exaone4": Form(
        has_head_norms=True, norms=BEHIND, one_meaning={"sliding_window": (None,)}, unused=("sliding_window_pattern",)
    ),
    "gemma": Form(
        "attention_bias",
        "attention_bias",
        norm_form=NormForm.ONE_MORE,
        activations={**ACTIVATIONS, "gelu": Activation.GELU_TANH},
        scales_by_width=True,
    ),
    "gemma3_text": Form(
        "attention_bias",
        "attention_bias",
        has_head_norms=True,
        norms=AROUND_PARTS,
        norm_form=NormForm.ONE_MORE,
        activation_key="hidden_activation",
        scales_by_width=True,
        scales={"score_width": "query_pre_attn_scalar"},
        windows=by_layer_types_or_pattern,
        has_window_angles=True,
    ),
    "glm": Form("attention_bias", is_interleaved=True, turned_share=0.5, names=FUSED_GATES),
    "glm4": Form("attention_bias", is_interleaved=True, turned_share=0.5, names=FUSED_GATES, norms=AROUND),
    "granite": Form(*IN_ALL, scales=GRANITE),
    "granitemoehybrid": Form(
        "attention_bias",
        "attention_bias",
        names=SHARED_GATES,
        scales=GRANITE,
        intermediate_key="shared_intermediate_size",
        one_meaning={"num_local_experts": (0,), "position_embedding_type": ("rope",)},
        unused=("mamba_", "num_experts_per_tok", "router_aux_loss_coef", "time_step_limit", "layers_block_type"),
    ),
    "helium": Form("attention_bias", None, "mlp_bias", is_interleaved=True, norm_form=NormForm.ONCE),
    "hunyuan_v1_dense": Form(
        "attention_bias",
        "attention_bias",
        has_head_norms=True,
        norms_turned=True,
        names={"query_norm": "self_attn.query_layernorm", "key_norm": "self_attn.key_layernorm"},
        unused=HUNYUAN_UNUSED,
    ),
    "llama": Form(*IN_ALL),
    "ministral": Form(windows=by_layer_types),
    "mistral": Form(windows=in_all_layers),
    "olmo2": Form(
        "attention_bias",
        "attention_bias",
        has_head_norms=True,
        joins_heads=True,
        norms=BEHIND,
        norm_form=NormForm.ONCE,
        rounds_angles=False,
    ),
    "phi3": Form(
        turned_share=1.0,
        names=FUSED_QUERIES | FUSED_GATES,
        has_long_angles=True,
        windows=in_all_layers_if_said,
        unused=("full_attn_mod", "interpolate_factor"),
    ),
    "qwen2": Form(ALWAYS, windows=where_switched_on),
    "qwen3": Form("attention_bias", "attention_bias", has_head_norms=True, windows=where_switched_on),
    "seed_oss": Form("attention_bias", "attention_out_bias", "mlp_bias"),
    "smollm3": Form(*IN_ALL, has_still_layers=True),
}
WINDOW_ANGLE_KEYS = {"rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern"}
THETAS = {"full_attention": 1e6, "sliding_attention": 1e4}  # where a config of Gemma 3 says none
BY_LAYER = (by_layer_types, by_layer_types_or_pattern, where_switched_on)  # which look at `layer_types`
SIZES = {
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "rms_norm_eps",
    "partial_rotary_factor",
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
    "tie_word_embeddings",
}
ONE_MEANING: dict[str, tuple[Any, ...]] = {  # a key that changes the forward, and the values with which it does not
    "pretraining_tp": (1,),
    "use_mrope": (False,),
    "use_bidirectional_attention": (None, False),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "is_causal": (True,),
}
NO_WINDOWS: dict[str, tuple[Any, ...]] = {"sliding_window": (None,), "use_sliding_window": (False,)}  # as above
STILL_KEYS = {"no_rope_layers", "no_rope_layer_interval"}  # the latter is used where the former is not said
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
LINEARS = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
HEAD_NORMS = {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}


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
    form: Form
    parts: tuple[str, ...]  # the tensors of a layer, no more and no less
    activation: Activation
    num_turned: int  # dimensions of a head that are turned
    still_layers: frozenset[int]  # that turn no heads
    windows: Windows
    window_rotary: Rotary | None  # of layers that have windows, where these have one of their own
    windowed_layers: frozenset[int]  # also those whose windows hide nothing
    scales: Mapping[str, float]  # of `Form.scales`; of scores, 1 is none

    @property
    def head_order(self) -> list[int] | None:
        """Where the kernels' dimensions of a head stand in the stored one; None where they stand there themselves.

        They turn pairs half a head apart, so other pairs are brought there. What is not turned stands in pairs, too,
        whose angle is 0.
        """
        turned, rest = self.num_turned, self.head_dim - self.num_turned
        if not self.form.is_interleaved and not rest:
            return None
        firsts = list(range(0, turned, 2)) if self.form.is_interleaved else list(range(turned // 2))
        seconds = [each + (1 if self.form.is_interleaved else turned // 2) for each in firsts]
        still = list(range(turned, self.head_dim))
        return [*firsts, *still[: rest // 2], *seconds, *still[rest // 2 :]]

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
    head_dim, form = _head_dim(config), KINDS[config["model_type"]]
    num_turned = _num_turned(config, form, head_dim)
    if not isinstance(config[form.epsilon_key], float):
        raise ValueError(f"its {form.epsilon_key} is {config[form.epsilon_key]!r}")
    sizes = {
        "num_layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"],
        "head_dim": head_dim,
        "intermediate": config[form.intermediate_key],
        "vocab": config["vocab_size"],
    }
    if fault := sizes_fault(**sizes):
        raise ValueError(fault)
    return DenseConfig(
        **sizes,
        epsilon=config[form.epsilon_key],
        rotary=replace(_rotary(config, head_dim, num_turned), is_rounded=form.rounds_angles),
        is_tied=_is_tied(config),
        form=form,
        parts=tuple(_parts(config, form)),
        activation=form.activations[config[form.activation_key]],
        num_turned=num_turned,
        still_layers=_still_layers(config) if form.has_still_layers else frozenset(),
        windows=_windows(config, form),
        window_rotary=_window_rotary(config, head_dim) if form.has_window_angles else None,
        windowed_layers=frozenset(_windowed_layers(config, form)),
        scales={what: _number(config, key) for what, key in form.scales.items()},
    )


def _other_form(config: dict[str, Any]) -> str | None:
    """Say what of a layer's form the kernels do not have; None for one that they have."""
    kind = config.get("model_type")
    if kind not in KINDS:
        return KERNELS_LACK.get(str(kind), "its layers are of another form")
    form = KINDS[str(kind)]
    known = {name for name, is_windowed in IS_WINDOWED.items() if form.windows in BY_LAYER or not is_windowed}
    if others := set(map(str, config.get("layer_types") or ())) - known:
        return f"its layers have {', '.join(sorted(others))}"
    one_meaning = ONE_MEANING | dict(form.one_meaning) | ({} if form.windows else NO_WINDOWS)
    for key, value in config.items():
        if key in one_meaning and value not in one_meaning[key]:
            return f"its {key} is {value!r}"
    if unsaid := sorted(key for key in form.one_meaning if key not in config):
        return f"its {unsaid[0]} is left to a default"
    if (key := form.activation_key) not in config:
        return f"its {key} is left to a default"
    if str(config[key]) not in form.activations:
        return f"its {key} is {config[key]!r}"
    unknown = sorted(key for key, value in config.items() if _may_matter(key, value, form))
    return f"its config has {unknown[0]}, which may change a layer" if unknown else None


def _may_matter(key: str, value: Any, form: Form) -> bool:
    """Tell whether a key may be a number of a layer that is not understood here; words and switches are none.

    The classes of these kinds look at no other keys than those named above, so what is not a number is of somebody's
    tools.
    """
    known = SIZES | set(ONE_MEANING | NO_WINDOWS) | SAID_ELSEWHERE
    known |= {form.intermediate_key, form.epsilon_key, *form.one_meaning, *form.scales.values()}
    known |= STILL_KEYS if form.has_still_layers else set()
    known |= WINDOW_ANGLE_KEYS if form.has_window_angles else set()
    if key in known or key.endswith(("_token_id", "_token_ids")) or key.startswith(form.unused or ("\0",)):
        return False
    numbers = value if isinstance(value, list) else [value]
    return any(isinstance(each, int | float) and not isinstance(each, bool) for each in numbers)


def _is_tied(config: dict[str, Any]) -> bool:
    return bool(config.get("tie_word_embeddings", False))


def _head_dim(config: dict[str, Any]) -> int:
    """Read a head's width. Raises KeyError, TypeError or ValueError for none, or one left to another default."""
    head_dim = config.get("head_dim")
    if head_dim is None and config["model_type"] != "qwen3":
        head_dim = config["hidden_size"] // config["num_attention_heads"]
    if not isinstance(head_dim, int):
        raise ValueError("transformers tells more of it")
    return head_dim


def _num_turned(config: dict[str, Any], form: Form, head_dim: int) -> int:
    """The dimensions of a head that are turned by its position. Raises ValueError for an odd number."""
    default = 1.0 if form.turned_share is None else form.turned_share
    said = _angles(config).get("partial_rotary_factor", config.get("partial_rotary_factor", default))
    turned = int(head_dim * float(said))
    if not 0 < turned <= head_dim or turned % 2 or (form.turned_share is None and turned < head_dim):
        raise ValueError(f"its partial_rotary_factor is {said!r}")
    return turned


def _angles(config: dict[str, Any], layers: str = "full_attention") -> dict[str, Any]:
    """The config's words about the angles of some layers, with their base."""
    if KINDS[config["model_type"]].has_window_angles:
        return _angles_by_type(config, layers)
    said = config.get("rope_scaling") or config.get("rope_parameters") or {"rope_type": "default"}
    return {"rope_theta": config["rope_theta"]} | said if "rope_theta" in config else dict(said)


def _angles_by_type(config: dict[str, Any], layers: str) -> dict[str, Any]:
    """The words about one type of layers: named by it, or in keys of their own. Only layers without windows stretch."""
    parameters = config.get("rope_parameters") or {}
    if isinstance(parameters.get(layers), dict):
        own: dict[str, Any] = parameters[layers]
        return {"rope_theta": THETAS[layers]} | own
    if parameters:
        raise ValueError("its rope_parameters do not tell of each type of layers")
    if layers == "sliding_attention":
        return {"rope_type": "default", "rope_theta": config.get("rope_local_base_freq", THETAS[layers])}
    said: dict[str, Any] = config.get("rope_scaling") or {"rope_type": "default"}
    return {"rope_theta": config.get("rope_theta", THETAS[layers])} | said


def _window_rotary(config: dict[str, Any], head_dim: int) -> Rotary:
    """Read the angles of layers that have windows. Raises KeyError, TypeError or ValueError as `_rotary` does."""
    return rotary_of(_angles(config, "sliding_attention"), head_dim, is_strict=True)


def _windowed_layers(config: dict[str, Any], form: Form) -> Iterator[int]:
    """The layers that have a window. Raises KeyError or ValueError."""
    if form.windows is not None:
        yield from (number for number, size in enumerate(form.windows(config)) if size is not None)


def _rotary(config: dict[str, Any], head_dim: int, num_turned: int) -> Rotary:
    """Read the angles. Raises KeyError, TypeError or ValueError for those left to a default, or none of ours."""
    said = {name: value for name, value in _angles(config).items() if name != "partial_rotary_factor"}
    if "longrope" in (said.get("rope_type"), said.get("type")):
        said = _long_angles(said, config)
    rotary = rotary_of(said, num_turned, is_strict=True)
    return rotary if num_turned == head_dim else rotary.beside_still(head_dim // 2)


def _long_angles(said: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The config's words about longrope, with those beside it. Raises KeyError, TypeError or ValueError."""
    if not KINDS[config["model_type"]].has_long_angles:
        raise ValueError("its kind was not tried with longrope")
    most, original = (_number(config, f"{which}max_position_embeddings") for which in ("", "original_"))
    said = {"factor": most / original} | {name: value for name, value in said.items() if name != "type"}
    # what stands beside the angles counts before what stands among them
    return said | {"rope_type": "longrope", "original_max_position_embeddings": original}


def _still_layers(config: dict[str, Any]) -> frozenset[int]:
    """The layers that turn no heads. Raises KeyError or ValueError where the config does not tell them one by one."""
    turns = config["no_rope_layers"]
    if not isinstance(turns, list) or len(turns) != config["num_hidden_layers"] or set(turns) - {0, 1}:
        raise ValueError("its no_rope_layers do not tell of each layer")
    return frozenset(number for number, is_turned in enumerate(turns) if not is_turned)


def _windows(config: dict[str, Any], form: Form) -> Windows:
    """The layers' windows, but for those that hide nothing of the longest text. Raises KeyError or ValueError."""
    if form.windows is None:
        return (None,) * int(config["num_hidden_layers"])
    longest = config.get("max_position_embeddings") or math.inf
    return tuple(None if size is None or size >= longest else size for size in form.windows(config))


def _number(config: dict[str, Any], key: str) -> float:
    """Raises KeyError or ValueError for a number that is missing or is none."""
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"its {key} is {value!r}")
    return float(value)


def _parts(config: dict[str, Any], form: Form) -> list[str]:
    """The tensors of a layer."""
    names = form.linears
    parts = [f"{part}.weight" for part in (*form.norms.values(), *dict.fromkeys(names.values()))]
    parts += dict.fromkeys(f"{names[role]}.bias" for role in _biased(config, form) if role in names)
    return parts + [f"{part}.weight" for part in form.head_norms.values()]


def _biased(config: dict[str, Any], form: Form) -> list[str]:
    """The linear layers that have a bias."""

    def has(key: str | None) -> bool:
        return key == ALWAYS or (key is not None and bool(config.get(key, False)))

    roles = ["query", "key", "value"] * has(form.query_key_value_bias) + ["output"] * has(form.output_bias)
    return roles + ["gate", "up", "down"] * has(form.mlp_bias)
