"""The description of an architecture. Without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from swiftbatch.worker.kernels.kernel_sizes import StreamSizes
from swiftbatch.worker.kernels.layer_specs import Activation, NormForm
from swiftbatch.worker.model.architectures.attention_layers import (
    IS_WINDOWED,
    BlockHeads,
    HeadsInWindows,
    MLASpec,
    NoPESpec,
    OwnHeads,
    WindowSpec,
)
from swiftbatch.worker.model.architectures.moe_layers import MoESpec
from swiftbatch.worker.model.architectures.recurrent_layers import MixerSpec
from swiftbatch.worker.model.config_values import ACTIVATION, COUNT, POSITIVE, SIZE, SWITCH, Config, KeyRule, number_of

ALWAYS = "always"  # the bias always exists, without a config key
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
PLE_TABLE = "model.embed_tokens_per_layer.weight"  # per-layer embeddings
PLE_OF_ALL = {"ple_projection": "model.per_layer_model_projection", "ple_norm": "model.per_layer_projection_norm"}
PLE_LINEARS = {"ple_gate": "per_layer_input_gate", "ple_output": "per_layer_projection"}
PLE_OUTPUT_NORM = "post_per_layer_input_norm"
STREAMS = {"attention_streams": "attn_hc.", "mlp_streams": "ffn_hc."}  # prefixes within a layer
STREAM_PARTS = {"mix": "fn", "bias": "base", "scale": "scale"}
STREAMS_OF_HEAD = "model.hc_head.hc_"
OF_KEYS = tuple(f"self_attn.{part}." for part in ("k_proj", "v_proj", "k_norm", "v_norm"))
QK_NORMS = {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
IN_FRONT = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
BEHIND = {"output_norm": "post_attention_layernorm", "down_norm": "post_feedforward_layernorm"}
ACTIVATIONS = {"gelu_pytorch_tanh": Activation.GELU_TANH, "relu2": Activation.RELU2, "silu": Activation.SILU}
NULL_HEADS = {"num_key_value_heads": SIZE.or_null()}  # None means as many key heads as query heads
NULL_WIDTH = {"head_dim": SIZE.or_null()}  # None means that all query heads together have the width of a row
PATTERN_RULE = {"sliding_window_pattern": SIZE.or_null()}
NULL_SIZES = NULL_HEADS | NULL_WIDTH

# parts of GGUF's metadata and tensor names that several architectures share

SILU = {"hidden_act": "silu"}
NO_BIASES = {"attention_bias": False, "mlp_bias": False}
WINDOW = {"attention.sliding_window": "sliding_window"}


@dataclass(frozen=True)
class GGUFSpec:
    """An architecture as llama.cpp writes it into GGUF files."""

    name: str  # the architecture's name in GGUF files
    fixed: Mapping[str, Any]  # config values that are the same in every model
    said: Mapping[str, str] = field(default_factory=dict)  # key of the metadata -> key of the config
    unsaid: Mapping[str, Any] = field(default_factory=dict)  # defaults for `said` keys that the metadata lacks
    names: Mapping[str, str] = field(default_factory=dict)  # tensor names that differ from Llama's
    completed: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: {}  # adds keys that follow from others
    local_base: str | None = None  # key of the rotary base of layers with windows
    turns_parts: bool = False  # rotary positions may apply to only a part of each head
    has_paired_heads: bool = False  # rows of queries and keys that form a rotary pair are adjacent
    tokens_take_spaces: bool = False  # special tokens absorb the spaces that follow them (SentencePiece)
    has_raised_norms: bool = False  # stored norms include the 1 that the architecture adds to weights


@dataclass(frozen=True)
class WindowAngles:
    """The default rotary bases of layers with and without windows, and the config key of the former."""

    full: float
    windowed: float
    windowed_key: str | None = None
    full_key: str = "rope_theta"

    def theta(self, layers: str) -> float:
        return self.windowed if IS_WINDOWED[layers] else self.full


@dataclass(frozen=True)
class StreamSpec:
    """Config keys of the streams of a row's state (hyper-connections)."""

    count: str
    num_sinkhorn: str
    epsilon: str

    def rules(self) -> dict[str, KeyRule | None]:
        return {self.count: SIZE, self.num_sinkhorn: SIZE, self.epsilon: POSITIVE}

    def read(self, config: Config) -> StreamSizes:
        """Read the streams. Raises KeyError or ValueError."""
        count, num_sinkhorn = (SIZE.of(config, key) for key in (self.count, self.num_sinkhorn))
        return StreamSizes(count, num_sinkhorn, number_of(config, self.epsilon))


@dataclass(frozen=True)
class ArchitectureSpec:
    """An architecture's differences from Llama; fields that end in `_key` name keys of its config."""

    query_key_value_bias: str | None = None
    output_bias: str | None = None
    mlp_bias: str | None = None

    # names of tensors
    names: Mapping[str, str] = field(default_factory=dict)  # exceptions to `LINEARS`; roles may share a tensor
    norms: Mapping[str, str] = field(default_factory=lambda: IN_FRONT)  # role -> name
    final_norm: str = "model.norm"
    curve: tuple[str, ...] = ()  # tensors of XIELU in the order of `LayerWeights.curve`; the first two as trained
    sinks: str | None = None
    sinks_in_windows: bool = False  # layers without a window have no sinks
    head_bias: str | None = None  # key that says whether the head has a bias
    own_decoder: str = "model."  # prefix of published tensor names
    own_embedding: str | None = None  # the embedding's published name, if it has another prefix
    name_in_class: Callable[[str], str] | None = None  # returns a published name as its class in transformers has it

    # norms and linear layers
    norm_form: NormForm = NormForm.TWICE
    epsilon_key: str = "rms_norm_eps"
    has_qk_norms: bool = False
    qk_norms_key: str | None = None  # key of whether these norms exist
    qk_norms_differ: bool = False  # each head has its own norm weights
    joins_heads: bool = False  # norms of queries and keys span all heads of a row
    norms_values: bool = False  # values are normed, too, without weights
    norms_after_rope: bool = False  # these norms are applied after the rotation of each head
    has_gates: bool = True  # a gate multiplies the input of the MLP's last projection
    activation_key: str | None = "hidden_act"  # None if it is always SiLU
    activations: Mapping[str, Activation] = field(default_factory=lambda: ACTIVATIONS)  # by their name in the config
    intermediate_key: str = "intermediate_size"
    width: Callable[[Config], Any] | None = None  # computes the MLP's width if no key has it
    widths: Callable[[Config], list[int]] | None = None  # computes each layer's, if they differ; 0 for no MLP
    is_parallel: bool = False  # the MLP reads the same input as attention
    gates_heads: bool = False  # the query projection also has a gate after each head
    does_one_thing: bool = False  # a layer is either attention, mixer, MLP or experts, as a list says

    # scales
    scales_by_width: bool = False  # multiplies embeddings by the root of their width, which is rounded
    scales: Mapping[str, str] = field(default_factory=dict)  # what is scaled -> key of its factor
    scale_lists: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # keys of several, or null, and what of
    fixed_scales: Mapping[str, float] = field(default_factory=dict)  # what is scaled -> its factor in all models
    layer_scale: str | None = None  # tensor of a number that multiplies a layer's output
    caps: Mapping[str, str] = field(default_factory=dict)  # what is capped -> key of its soft cap, or null

    # rotary positions
    is_interleaved: bool = False  # rotary pairs are adjacent dimensions, not half a head apart
    partial_rotary_factor: float | None = None  # default of the rotated share; None: all of every head
    rounds_angles: bool = True  # rounds cosines and sines to the model's dtype
    nope: NoPESpec | None = None  # layers without rotary positions; None if all layers have them
    has_long_angles: bool = False  # longrope was tested with this architecture
    scales_long_angles: bool = False  # the config has a scale for short texts and one for long texts
    has_fixed_alpha: bool = False  # the rotary type `dynamic` with an `alpha` means a fixed, larger base
    window_angles: WindowAngles | None = None  # layers with windows have their own rotary base
    thetas_key: str | None = None  # key of each layer's rotary base; 0 for a layer without rotary positions
    growth_key: str | None = None  # key, within the rotary parameters, of how queries grow with their positions

    # other layers
    windows: WindowSpec | None = None  # None if all layers see all positions
    own_heads: OwnHeads | HeadsInWindows | BlockHeads | None = None  # of layers without a window, with one, or indexed
    value_dim_key: str | None = None  # key of the width of a head's values, if these may be narrower than keys
    shared_keys_key: str | None = None  # key of how many of the last layers read the keys of an earlier one
    ple_key: str | None = None  # key of the width of per-layer embeddings; 0 for none
    experts: MoESpec | None = None
    mixer: MixerSpec | None = None  # layers with a mixer instead of attention or beside it
    latent: MLASpec | None = None  # heads share one latent vector per position
    streams: StreamSpec | None = None  # of a row's state
    unlisted_layers: Callable[[Config], list[str] | None] = lambda config: None  # finds types of unlisted layers

    # keys of its config
    one_meaning: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # key -> its only supported values
    known_keys: tuple[str, ...] = ()  # prefixes of more keys that are read or do not change the forward
    defaults: Mapping[str, Any] = field(default_factory=dict)  # the class's defaults, which published configs rely on
    rules: Mapping[str, KeyRule | None] = field(default_factory=dict)  # rules of other keys; None if a key is not read
    faults: Callable[[Config], Iterable[str]] = lambda config: ()  # yields more faults, one line each
    view: Callable[[Config], dict[str, Any]] = dict  # returns its config with the usual keys
    defaults_head_dim: bool = False  # its class in transformers has a default `head_dim`

    # other names
    aliases: tuple[str, ...] = ()  # names of architectures that are equal to this one
    nested_in: tuple[str, ...] = ()  # multimodal architectures whose text model is this one
    gguf: GGUFSpec | None = None
    has_plain_tokenizer: bool = False  # `tokenizer.json` describes the whole tokenizer

    # what runs it
    lacks_class: bool = False  # `transformers` does not know it: `nas_model` has its class, which takes the text view
    kernels_lack: str | None = None  # why our kernels cannot run it beyond its attention; None if they can
    kernels_alone: str | None = None  # what only our kernels have of it; None if `transformers` has all
    on_cpu_alone: str | None = None  # the same, but of our kernels those for CPUs alone
    is_taken_over: bool = False  # the kernels may run it after `transformers` has filled in the config's missing values
    attends_in_chunks: bool = False

    @property
    def needs_kernels(self) -> str | None:
        """Return why `transformers` does not run it, or None if it does."""
        return self.kernels_alone or self.on_cpu_alone

    @property
    def indexed_types(self) -> frozenset[str]:
        """Return the types of layers whose rows attend to keys that an indexer chooses."""
        if isinstance(self.own_heads, BlockHeads):
            return frozenset({self.own_heads.layer_type})
        return frozenset() if self.latent is None else self.latent.types

    @property
    def linears(self) -> dict[str, str]:
        """Names of linear layers by role."""
        return {role: self.names.get(role, name) for role, name in LINEARS.items() if role != "gate" or self.has_gates}

    def activation(self, config: Config) -> Activation:
        """Return the model's activation. Raises KeyError for an unknown one."""
        return Activation.SILU if self.activation_key is None else self.activations[config[self.activation_key]]

    def intermediate(self, config: Config) -> Any:
        """Return the width of the MLP, or of the widest one. Raises KeyError if the config lacks it."""
        return config[self.intermediate_key] if self.width is None else self.width(config)

    def norm_tensors(self, part: str) -> list[str]:
        return [f"{part}.weight", *([f"{part}.bias"] if self.norm_form == NormForm.SHIFTED else [])]

    def qk_norms(self, config: Config) -> dict[str, str]:
        """Return the norms of queries and keys by role.

        Raises KeyError if the config does not tell whether the model has them.
        """
        has_norms = config[self.qk_norms_key] if self.qk_norms_key else self.has_qk_norms
        return {role: self.names.get(role, part) for role, part in QK_NORMS.items() if has_norms}

    def biased(self, config: Config) -> list[str]:
        def has(key: str | None) -> bool:
            return key == ALWAYS or (key is not None and bool(config.get(key, False)))

        roles = ["query", "key", "value"] * has(self.query_key_value_bias) + ["output"] * has(self.output_bias)
        return roles + ["gate", "up", "down"] * has(self.mlp_bias)

    def own_rules(self) -> dict[str, KeyRule | None]:
        """Return the rules for all config keys that this spec names."""
        windowed = self.window_angles.windowed_key if self.window_angles else None
        rules: dict[Any, KeyRule | None] = {self.intermediate_key: SIZE, self.activation_key: ACTIVATION.or_null()}
        rules |= dict.fromkeys((self.shared_keys_key, self.ple_key), COUNT) | {self.value_dim_key: SIZE}
        biases = (self.query_key_value_bias, self.output_bias, self.mlp_bias, self.head_bias, self.qk_norms_key)
        rules |= dict.fromkeys(biases, SWITCH)
        rules |= dict.fromkeys((self.epsilon_key, *self.scales.values(), windowed), POSITIVE)
        rules |= dict.fromkeys(self.caps.values(), POSITIVE.or_null())
        rules |= {key: POSITIVE.list_of(len(names)) for key, names in self.scale_lists.items()}
        rules |= {self.thetas_key: None}  # `PER_LAYER` has its rule
        for part in (self.experts, self.mixer, self.latent, self.own_heads, self.streams):
            rules |= part.rules() if part else {}
        return {key: rule for key, rule in rules.items() if isinstance(key, str) and key != ALWAYS}
