"""The names and forms that kinds of dense decoders differ in, as configs and tensors have them. Without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from swiftbatch.worker.kernels.layer_specs import Activation, NormForm
from swiftbatch.worker.model.architectures.attention_layers import IS_WINDOWED, MLASpec, NoPESpec, WindowSpec
from swiftbatch.worker.model.architectures.moe_layers import MoESpec
from swiftbatch.worker.model.architectures.recurrent_layers import RecurrentTensorNames

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
LINEARS = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
ATTENTION = ("query", "key", "value", "output")
QK_NORMS = {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}


@dataclass(frozen=True)
class WindowAngles:
    """The bases of a kind's two types of layers where its config says none, and the key of those with windows."""

    full: float
    windowed: float
    windowed_key: str | None = None

    def theta(self, layers: str) -> float:
        return self.windowed if IS_WINDOWED[layers] else self.full


@dataclass(frozen=True)
class ArchitectureSpec:
    """Names that a kind has for what all decoders have. Biases are there where the key that is named here says so."""

    query_key_value_bias: str | None = None
    output_bias: str | None = None
    mlp_bias: str | None = None
    has_qk_norms: bool = False
    qk_norms_key: str | None = None  # that says whether they are there
    qk_norms_differ: bool = False  # each head has weights of its own
    joins_heads: bool = False  # norms of queries and keys go over all heads of a row together
    norms_after_rope: bool = False  # they stand behind the rotation of each head
    norms: Mapping[str, str] = field(default_factory=lambda: IN_FRONT)  # their names, by what they norm
    norm_form: NormForm = NormForm.TWICE
    activations: Mapping[str, Activation] = field(default_factory=lambda: ACTIVATIONS)  # by the config's words
    has_gates: bool = True
    rounds_angles: bool = True  # cosines and sines, to the model's dtype
    activation_key: str | None = "hidden_act"  # None: it is SiLU, always
    scales_by_width: bool = False  # embeddings, by the root of their width, which is rounded to the model's dtype
    is_interleaved: bool = False  # neighbours are turned, in place of dimensions half a head apart
    partial_rotary_factor: float | None = None  # of a head, where the config does not say it; None: all of it, always
    names: Mapping[str, str] = field(default_factory=dict)  # that differ from those below; roles with one name are one
    scales: Mapping[str, str] = field(default_factory=dict)  # keys of numbers that multiply, by what they multiply
    scale_lists: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # keys of several, or null, and what of
    caps: Mapping[str, str] = field(default_factory=dict)  # keys of soft caps, or null, by what they cap
    curve: tuple[str, ...] = ()  # tensors of XIELU: as `LayerWeights.curve`, the first two as they are trained
    still: NoPESpec | None = None  # None: all layers turn heads
    has_long_angles: bool = False  # longrope was tried on it
    scales_long_angles: bool = False  # by numbers of its own in the config, one for short texts and one for long ones
    has_fixed_alpha: bool = False  # angles of the type `dynamic` with an `alpha` are those of another base
    head_bias: str | None = None
    windows: WindowSpec | None = None  # None: all layers see all positions
    window_angles: WindowAngles | None = None  # layers with windows turn heads by angles of their own
    thetas_key: str | None = None  # of the bases that each layer turns by; 0 for a layer that turns no heads
    growth_key: str | None = None  # among the angles: how queries grow with their positions
    has_sinks: bool = False
    is_parallel: bool = False  # products read what attention reads
    gates_heads: bool = False  # queries are stored with a gate behind each head
    experts: MoESpec | None = None
    mixer: RecurrentTensorNames | None = None  # of layers that do not attend, or do both
    latent: MLASpec | None = None  # of heads that share one latent vector per position
    does_one_thing: bool = False  # a layer attends, mixes, or has products or experts, and not two of these
    final_norm: str = "model.norm"
    intermediate_key: str = "intermediate_size"
    width: Callable[[Mapping[str, Any]], Any] | None = None  # what counts in place of that key
    epsilon_key: str = "rms_norm_eps"
    one_meaning: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # beside `ONE_MEANING`
    unused: tuple[str, ...] = ()  # beginnings of keys of layers that it does not have here

    @property
    def linears(self) -> dict[str, str]:
        """The names of linear layers by their roles."""
        roles = (role for role in LINEARS if role != "gate" or self.has_gates)
        return {role: self.names.get(role, LINEARS[role]) for role in roles}

    def activation(self, config: Mapping[str, Any]) -> Activation:
        """The function between the products. Raises KeyError for none that is known here."""
        return Activation.SILU if self.activation_key is None else self.activations[config[self.activation_key]]

    def intermediate(self, config: Mapping[str, Any]) -> Any:
        """The width between the products. Raises KeyError where the config does not say it."""
        return config[self.intermediate_key] if self.width is None else self.width(config)

    def norm_tensors(self, part: str) -> list[str]:
        """The tensors of a norm of rows."""
        return [f"{part}.weight", *([f"{part}.bias"] if self.norm_form == NormForm.SHIFTED else [])]

    def qk_norms(self, config: Mapping[str, Any]) -> dict[str, str]:
        """The names of norms of queries and keys by their roles. Raises KeyError where the config does not say them."""
        has_norms = config[self.qk_norms_key] if self.qk_norms_key else self.has_qk_norms
        return {role: self.names.get(role, part) for role, part in QK_NORMS.items() if has_norms}


SHARED_GATES = {**dict.fromkeys(("gate", "up"), "shared_mlp.input_linear"), "down": "shared_mlp.output_linear"}
GRANITE = {"scores": "attention_multiplier", "embedding": "embedding_multiplier", "residual": "residual_multiplier"}
GRANITE |= {"logits": "logits_scaling"}
OLMO2 = ArchitectureSpec(
    "attention_bias",
    "attention_bias",
    has_qk_norms=True,
    joins_heads=True,
    norms=BEHIND,
    norm_form=NormForm.ONCE,
    rounds_angles=False,
)
COHERE = ArchitectureSpec(
    "attention_bias",
    "attention_bias",
    is_interleaved=True,
    norms={"input_norm": "input_layernorm"},
    norm_form=NormForm.CENTRED,
    is_parallel=True,
    epsilon_key="layer_norm_eps",
    scales={"logits_factor": "logit_scale"},
)
HUNYUAN_UNUSED = (
    *("anyres_", "attention_head_dim", "cla_share_factor", "class_num", "dense_list", "eod_token_id", "im_"),
    *("mask_init_id", "moe_", "num_experts", "num_media_embeds", "num_shared_expert", "org_vocab_size", "pad_id"),
    *("routed_scaling_factor", "sep_id", "text_", "video_", "vit_"),
)
HUNYUAN = ArchitectureSpec(
    "attention_bias",
    "attention_bias",
    has_qk_norms=True,
    norms_after_rope=True,
    names={"query_norm": "self_attn.query_layernorm", "key_norm": "self_attn.key_layernorm"},
    has_fixed_alpha=True,
    unused=HUNYUAN_UNUSED,
)
