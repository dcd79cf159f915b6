"""The description of an architecture. Without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from swiftbatch.worker.kernels.layer_specs import Activation, NormForm
from swiftbatch.worker.model.architectures.attention_layers import IS_WINDOWED, MLASpec, NoPESpec, WindowSpec
from swiftbatch.worker.model.architectures.moe_layers import MoESpec
from swiftbatch.worker.model.architectures.recurrent_layers import MixerSpec
from swiftbatch.worker.model.config_values import ACTIVATION, POSITIVE, SIZE, SWITCH, Config, KeyRule

ALWAYS = "always"  # stands for a bias without a key
ATTENTION = ("query", "key", "value", "output")
LINEARS = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
QK_NORMS = {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
IN_FRONT = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
BEHIND = {"output_norm": "post_attention_layernorm", "down_norm": "post_feedforward_layernorm"}
ACTIVATIONS = {"gelu_pytorch_tanh": Activation.GELU_TANH, "relu2": Activation.RELU2, "silu": Activation.SILU}
NULL_HEADS = {"num_key_value_heads": SIZE.or_null()}  # None means as many key heads as query heads
NULL_WIDTH = {"head_dim": SIZE.or_null()}  # heads share the width of a row
PATTERN_RULE = {"sliding_window_pattern": SIZE.or_null()}
NULL_SIZES = NULL_HEADS | NULL_WIDTH

# parts of GGUF's metadata and tensors that several families have

SILU = {"hidden_act": "silu"}
NO_BIASES = {"attention_bias": False, "mlp_bias": False}
WINDOW = {"attention.sliding_window": "sliding_window"}


def none_more(config: Config) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class GGUFSpec:
    """An architecture as llama.cpp writes it into GGUF files."""

    name: str  # the architecture's name there
    fixed: Mapping[str, Any]  # config values that are the same in every model
    said: Mapping[str, str] = field(default_factory=dict)  # keys of the config by those of the metadata
    unsaid: Mapping[str, Any] = field(default_factory=dict)  # defaults of `said` keys
    names: Mapping[str, str] = field(default_factory=dict)  # tensor names that differ from Llama's
    completed: Callable[[dict[str, Any]], dict[str, Any]] = none_more  # keys that follow from the others
    local_base: str | None = None  # key of the base of layers with windows
    turns_parts: bool = False  # turns only a part of each head
    has_paired_heads: bool = False  # rows of queries and keys that are turned together lie side by side
    tokens_take_spaces: bool = False  # special tokens take spaces behind them (SentencePiece)
    has_raised_norms: bool = False  # stored norms include the 1 that the kind adds


@dataclass(frozen=True)
class WindowAngles:
    """The default bases of layers, and the key of those with windows."""

    full: float
    windowed: float
    windowed_key: str | None = None

    def theta(self, layers: str) -> float:
        return self.windowed if IS_WINDOWED[layers] else self.full


def none_named(config: Config) -> list[str] | None:
    return None


def no_faults(config: Config) -> Iterator[str]:
    yield from ()


@dataclass(frozen=True)
class ArchitectureSpec:
    """An architecture's differences from Llama; names of keys belong to its config."""

    query_key_value_bias: str | None = None
    output_bias: str | None = None
    mlp_bias: str | None = None

    # names of tensors
    names: Mapping[str, str] = field(default_factory=dict)  # differ from `LINEARS`; roles with one name are one
    norms: Mapping[str, str] = field(default_factory=lambda: IN_FRONT)  # role -> name
    final_norm: str = "model.norm"
    curve: tuple[str, ...] = ()  # tensors of XIELU: as `LayerWeights.curve`, the first two as they are trained
    sinks: str | None = None
    head_bias: str | None = None  # key that says whether the head has a bias
    own_decoder: str = "model."  # begins the names of tensors as they are published
    own_embedding: str | None = None  # the embedding's published name, if another

    # norms and products
    norm_form: NormForm = NormForm.TWICE
    epsilon_key: str = "rms_norm_eps"
    has_qk_norms: bool = False
    qk_norms_key: str | None = None  # key that says whether they exist
    qk_norms_differ: bool = False  # each head has weights of its own
    joins_heads: bool = False  # norms of queries and keys go over all heads of a row together
    norms_after_rope: bool = False  # they stand behind the rotation of each head
    has_gates: bool = True  # a gate multiplies the input of the last product
    activation_key: str | None = "hidden_act"  # None: it is SiLU, always
    activations: Mapping[str, Activation] = field(default_factory=lambda: ACTIVATIONS)  # keys are words of the config
    intermediate_key: str = "intermediate_size"
    width: Callable[[Config], Any] | None = None  # computes the width in place of that key
    is_parallel: bool = False  # products read what attention reads
    gates_heads: bool = False  # queries are stored with a gate behind each head
    does_one_thing: bool = False  # a layer attends, mixes, or has products or experts; layers are named one by one

    # scales
    scales_by_width: bool = False  # embeddings, by the root of their width, which is rounded to the model's dtype
    scales: Mapping[str, str] = field(default_factory=dict)  # keys of numbers that multiply, by what they multiply
    scale_lists: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # keys of several, or null, and what of
    caps: Mapping[str, str] = field(default_factory=dict)  # keys of soft caps, or null, by what they cap

    # rotary positions
    is_interleaved: bool = False  # neighbours are turned, in place of dimensions half a head apart
    partial_rotary_factor: float | None = None  # turned share of a head without a config key; None: always all of it
    rounds_angles: bool = True  # cosines and sines, to the model's dtype
    nope: NoPESpec | None = None  # layers that turn no heads; None: all turn them
    has_long_angles: bool = False  # longrope was tried on it
    scales_long_angles: bool = False  # by numbers of its own in the config, one for short texts and one for long ones
    has_fixed_alpha: bool = False  # angles of the type `dynamic` with an `alpha` are those of another base
    window_angles: WindowAngles | None = None  # layers with windows turn heads by angles of their own
    thetas_key: str | None = None  # key of each layer's base; 0 for a layer that turns no heads
    growth_key: str | None = None  # among the angles: how queries grow with their positions

    # other layers
    windows: WindowSpec | None = None  # None: all layers see all positions
    experts: MoESpec | None = None
    mixer: MixerSpec | None = None  # layers that do not attend, or do both
    latent: MLASpec | None = None  # heads share one latent vector per position
    unlisted_layers: Callable[[Config], list[str] | None] = none_named  # the types of layers that no list names

    # keys of its config
    one_meaning: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # keys with the only values understood
    known_keys: tuple[str, ...] = ()  # beginnings of more keys that are read, or change no forward
    defaults: Mapping[str, Any] = field(default_factory=dict)  # the class's defaults, which published configs rely on
    rules: Mapping[str, KeyRule | None] = field(default_factory=dict)  # other ones; None: the key is not read
    faults: Callable[[Config], Iterator[str]] = no_faults  # more of them, in lines
    view: Callable[[Config], dict[str, Any]] = dict  # returns its config under common keys
    defaults_head_dim: bool = False  # its class has a default width of heads

    # other names
    aliases: tuple[str, ...] = ()  # architectures that are this one under a name of their own
    nested_in: tuple[str, ...] = ()  # architectures of images and text whose text model is this one
    gguf: GGUFSpec | None = None
    has_plain_tokenizer: bool = False  # `tokenizer.json` says all of it

    # what runs it
    kernels_lack: str | None = None  # why our kernels have its attention at most; None: they run it
    is_taken_over: bool = False  # by the kernels, where `transformers` has filled in what a config leaves to it
    attends_in_chunks: bool = False

    @property
    def linears(self) -> dict[str, str]:
        """Linear layers by role."""
        return {role: self.names.get(role, name) for role, name in LINEARS.items() if role != "gate" or self.has_gates}

    def activation(self, config: Config) -> Activation:
        """Raise KeyError for an unknown one."""
        return Activation.SILU if self.activation_key is None else self.activations[config[self.activation_key]]

    def intermediate(self, config: Config) -> Any:
        """Raise KeyError where the config does not say it."""
        return config[self.intermediate_key] if self.width is None else self.width(config)

    def norm_tensors(self, part: str) -> list[str]:
        return [f"{part}.weight", *([f"{part}.bias"] if self.norm_form == NormForm.SHIFTED else [])]

    def qk_norms(self, config: Config) -> dict[str, str]:
        """Raise KeyError if the config does not say whether it has them."""
        has_norms = config[self.qk_norms_key] if self.qk_norms_key else self.has_qk_norms
        return {role: self.names.get(role, part) for role, part in QK_NORMS.items() if has_norms}

    def biased(self, config: Config) -> list[str]:
        def has(key: str | None) -> bool:
            return key == ALWAYS or (key is not None and bool(config.get(key, False)))

        roles = ["query", "key", "value"] * has(self.query_key_value_bias) + ["output"] * has(self.output_bias)
        return roles + ["gate", "up", "down"] * has(self.mlp_bias)

    def own_rules(self) -> dict[str, KeyRule | None]:
        """Return rules of keys that are named here; their numbers are understood."""
        windowed = self.window_angles.windowed_key if self.window_angles else None
        rules: dict[Any, KeyRule | None] = {self.intermediate_key: SIZE, self.activation_key: ACTIVATION.or_null()}
        biases = (self.query_key_value_bias, self.output_bias, self.mlp_bias, self.head_bias, self.qk_norms_key)
        rules |= dict.fromkeys(biases, SWITCH)
        rules |= dict.fromkeys((self.epsilon_key, *self.scales.values(), windowed), POSITIVE)
        rules |= dict.fromkeys(self.caps.values(), POSITIVE.or_null())
        rules |= {key: POSITIVE.list_of(len(names)) for key, names in self.scale_lists.items()}
        rules |= {self.thetas_key: None}  # lists with a value per layer share one rule
        for part in (self.experts, self.mixer, self.latent):
            rules |= part.rules() if part else {}
        return {key: rule for key, rule in rules.items() if isinstance(key, str) and key != ALWAYS}
