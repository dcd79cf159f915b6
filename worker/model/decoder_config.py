"""A decoder's description for our kernels, read from its config alone. Without torch.

Models with other configs, such as those with unknown numbers, run in `transformers`' layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from swiftbatch.worker.kernels.kernel_sizes import LANES, CacheLayer, LayerHeads, StreamSizes, sizes_fault
from swiftbatch.worker.kernels.layer_specs import Activation
from swiftbatch.worker.kernels.rope_scaling import Rotary
from swiftbatch.worker.model.architectures.attention_layers import (
    BLOCK_LINEARS,
    BLOCK_NORMS,
    IS_WINDOWED,
    MLAConfig,
    Windows,
    layers_of_keys,
    no_windows,
    that_hide,
)
from swiftbatch.worker.model.architectures.catalogue import (
    architecture_of,
    attending_layers,
    layer_types,
    recurrent_shape,
)
from swiftbatch.worker.model.architectures.deepseek_v4 import CompressedConfig
from swiftbatch.worker.model.architectures.moe_layers import CHOSEN_KEYS, COUNT_KEYS, ROLES, MoEConfig, read_moe
from swiftbatch.worker.model.architectures.recurrent_layers import (
    ATTENDING,
    RECURRENT,
    STATELESS,
    RecurrentConfig,
    read_recurrent_layers,
)
from swiftbatch.worker.model.architectures.spec import (
    ATTENTION,
    PLE_LINEARS,
    PLE_OF_ALL,
    PLE_OUTPUT_NORM,
    PLE_TABLE,
    STREAM_PARTS,
    STREAMS,
    STREAMS_OF_HEAD,
    ArchitectureSpec,
)
from swiftbatch.worker.model.config_values import COUNT, POSITIVE, SIZE, Config, number_of, shown
from swiftbatch.worker.model.rotary_config import num_rotary_dims_of, other_layers_of, other_rotary_of, own_rotary
from swiftbatch.worker.model.text_config import EMBEDDING, HEAD, HEAD_BIAS

SIZES = {
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "vocab_size", "rms_norm_eps", "partial_rotary_factor", "rope_theta", "rope_parameters"),
    *("rope_scaling", "tie_word_embeddings"),
}
ONE_MEANING: dict[str, tuple[Any, ...]] = {  # keys that may change the forward, with the values at which they do not
    "use_mrope": (False,),
    "use_bidirectional_attention": (None, False),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "is_causal": (True,),
    "rotary_pct": (1.0,),
}
NO_WINDOWS: dict[str, tuple[Any, ...]] = {"sliding_window": (None,), "use_sliding_window": (False,)}  # as above
GENERATING = {  # numbers that older versions of `transformers` wrote into every config
    *("diversity_penalty", "encoder_no_repeat_ngram_size", "length_penalty", "max_length", "min_length"),
    *("no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "repetition_penalty"),
    *("temperature", "top_k", "top_p", "typical_p"),
}
AROUND_MIXING = ("input_norm", "output_norm")  # roles of norms around attention or a mixer
OF_EXPERTS = {*COUNT_KEYS, *CHOSEN_KEYS, "router_aux_loss_coef"}
SAID_ELSEWHERE = {  # about training, generation or towers beside the text, or evident from the weights
    *("attention_bias", "attention_dropout", "attention_out_bias", "chunk_size_feed_forward", "embd_pdrop"),
    *("embedding_dropout", "hidden_dropout", "initializer_range", "layer_types", "max_position_embeddings"),
    *("max_window_layers", "mlp_bias", "num_nextn_predict_layers", "resid_pdrop", "residual_dropout"),
    "pretraining_tp",  # how a training split matrices
    "original_max_position_embeddings",  # rotary scaling repeats it
    *GENERATING,
}


@dataclass(frozen=True)
class DecoderConfig:
    """The sizes of a decoder, its rotary positions, and the tensors of its layers."""

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
    form: ArchitectureSpec
    biased: list[str]  # the roles of linear layers that have a bias
    activation: Activation
    num_rotary_dims: int  # rotated dimensions of a head
    attending: frozenset[int]
    mlp_widths: tuple[int, ...]  # of each layer's MLP or shared expert; 0 for a layer without either
    nope_layers: frozenset[int]  # layers without rotary positions
    windows: Windows
    other_rotary: Rotary | None  # rotation of `other_layers`, such as layers with windows
    other_layers: frozenset[int]
    scales: Mapping[str, float]  # values of `Form.scales`; 1 scales no scores
    caps: Mapping[str, float]  # values of `Form.caps`; 0 caps nothing
    qk_norms: Mapping[str, str]  # role -> name
    experts: MoEConfig | None
    mixer: RecurrentConfig | None
    latent: MLAConfig | None
    streams: StreamSizes | None
    own_heads: LayerHeads | None  # of `own_layers`; None if all have the same
    own_layers: frozenset[int]  # layers without a window or with one, where these differ from others
    value_dim: int  # of a head; 0 if it is as wide as a key
    shared_keys: Mapping[int, int]  # a layer that shares keys and values -> the layer that has them
    ple_dim: int  # 0 without per-layer embeddings
    keys_are_values: bool  # in `own_layers`
    linear_names: Mapping[str, str]  # role -> name, in a layer without experts
    has_head_bias: bool

    @property
    def head_order(self) -> list[int] | None:
        """Return the stored index of each dimension of a head in the kernels' order, or None if the orders are equal.

        The kernels rotate pairs that are half a head apart. Dimensions without rotation form pairs, too, with the angle
        0.
        """
        if self.latent is not None:
            return None
        turned, rest = self.num_rotary_dims, self.head_dim - self.num_rotary_dims
        if not self.form.is_interleaved and not rest:
            return None
        firsts = list(range(0, turned, 2)) if self.form.is_interleaved else list(range(turned // 2))
        seconds = [each + (1 if self.form.is_interleaved else turned // 2) for each in firsts]
        still = list(range(turned, self.head_dim))
        return [*firsts, *still[: rest // 2], *seconds, *still[rest // 2 :]]

    @property
    def stripes(self) -> tuple[int, ...]:
        """Return the heads of a cache that each layer with keys takes, or () if all take `num_kv_heads`."""
        if isinstance(self.latent, CompressedConfig):
            return tuple(kept.stripes for kept in self._kept(self.latent))
        if self.own_heads is None:
            return ()
        own = self.own_heads.num_stripes(self.head_dim)
        return tuple(own if number in self.own_layers else self.num_kv_heads for number in self._keeping)

    @property
    def kept_windows(self) -> Windows:
        """Return the windows of layers with keys in a cache."""
        if isinstance(self.latent, CompressedConfig):
            return tuple(kept.window for kept in self._kept(self.latent))
        return tuple(self.windows[number] for number in self._keeping)

    def _kept(self, compressed: CompressedConfig) -> list[CacheLayer]:
        return [kept for number in range(self.num_layers) for kept in compressed.kept(number)]

    @property
    def _keeping(self) -> list[int]:
        return [number for number in range(self.num_layers) if number not in self.shared_keys]

    def heads(self, number: int) -> LayerHeads | None:
        """Return the heads of a layer that are not the model's."""
        return self.own_heads if number in self.own_layers else None

    def chooses_blocks(self, number: int) -> bool:
        """Return whether a layer's rows attend to blocks of keys that an indexer chooses."""
        heads = self.heads(number)
        return heads is not None and heads.blocks is not None

    def widths(self, number: int) -> dict[str, int]:
        """Return the number of rows of each role in linear layers that some architectures store as one."""
        heads = self.heads(number) or LayerHeads(self.num_kv_heads, self.head_dim)
        width, values = self.mlp_widths[number], heads.num_kv_heads * (self.value_dim or heads.head_dim)
        queries, keys = (count * heads.head_dim for count in (self.num_heads, heads.num_kv_heads))
        return {"query": queries, "key": keys, "value": values, "gate": width, "up": width}

    def norms(self, number: int) -> dict[str, str]:
        """Return the names of a layer's norms by role."""
        mixes = number in self.attending or (self.mixer is not None and number in self.mixer.layers)
        has_experts = self.experts is not None and number in self.experts.layers
        has = {True: mixes, False: has_experts or self.mlp_widths[number] > 0}
        return {role: name for role, name in self.form.norms.items() if has[role in AROUND_MIXING]}

    def sinks(self, number: int) -> str | None:
        """Return the name of a layer's sinks, or None if it has none."""
        return self.form.sinks if number in self.other_layers or not self.form.sinks_in_windows else None

    def head_norms(self, number: int) -> dict[str, str]:
        """Return the names of the norms of a layer's queries and keys by role, with those of its indexer of blocks."""
        absent = {"key_norm"} if number in self.shared_keys else set()
        of_indexer = BLOCK_NORMS if self.chooses_blocks(number) else {}
        return {role: name for role, name in self.qk_norms.items() if role not in absent} | dict(of_indexer)

    def linears(self, number: int) -> dict[str, str]:
        """Return a layer's linear layers by role, including those of the shared expert."""
        has = {True: number in self.attending, False: self.mlp_widths[number] > 0}
        names = {role: name for role, name in self.linear_names.items() if has[role in ATTENTION]}
        names |= BLOCK_LINEARS if self.chooses_blocks(number) else {}
        if number in self.shared_keys:
            names = {role: name for role, name in names.items() if role not in ("key", "value")}
        elif self.keys_are_values and number in self.own_layers:
            del names["value"]
        if self.experts is None or number not in self.experts.layers:
            return names
        shared = (self.experts.names.shared or {}) if self.mlp_widths[number] else {}
        return {role: name for role, name in names.items() if role not in ROLES} | dict(shared)

    def tensor_names(self, stored: set[str]) -> set[str]:
        """Return the names of all tensors; `stored` decides how experts are stored."""
        names = {name for number in range(self.num_layers) for name in self._layer_names(number, stored)}
        of_the_model = {EMBEDDING, *self.form.norm_tensors(self.form.final_norm)}
        of_the_model |= {PLE_TABLE, *(f"{part}.weight" for part in PLE_OF_ALL.values())} if self.ple_dim else set()
        of_the_model |= {f"{STREAMS_OF_HEAD}{part}" for part in STREAM_PARTS.values()} if self.streams else set()
        of_the_model |= (set() if self.is_tied else {HEAD}) | ({HEAD_BIAS} if self.has_head_bias else set())
        return names | of_the_model

    def _layer_names(self, number: int, stored: set[str]) -> Iterator[str]:
        form, prefix, linears = self.form, f"model.layers.{number}.", self.linears(number)
        parts = [tensor for part in self.norms(number).values() for tensor in form.norm_tensors(part)]
        parts += [*form.curve, *(f"{part}.weight" for part in linears.values())]
        parts += [form.layer_scale] if form.layer_scale else []
        parts += [f"{linears[role]}.bias" for role in self.biased if role in linears]
        if number in self.attending:
            parts += [f"{part}.weight" for part in self.head_norms(number).values()]
            parts += [sinks] if (sinks := self.sinks(number)) else []
        if self.ple_dim:
            parts += [f"{part}.weight" for part in (*PLE_LINEARS.values(), PLE_OUTPUT_NORM)]
        parts += [] if self.latent is None else self.latent.index_tensors(number)
        if self.streams is not None:
            parts += [f"{prefix}{part}" for prefix in STREAMS.values() for part in STREAM_PARTS.values()]
        if self.mixer is not None and number in self.mixer.layers:
            parts += self.mixer.parts()
        if self.experts is not None and number in self.experts.layers:
            parts += self.experts.parts(number, self.experts.is_fused(stored, prefix))
        yield from (prefix + part for part in parts)


class OtherDecoderError(ValueError):
    """The kernels do not support the decoder. The text tells a user why."""


def read_decoder_config(config: Config) -> DecoderConfig:
    """Read a text model's config. Raises OtherDecoderError."""
    form = architecture_of(config)
    if form is None:
        raise OtherDecoderError("its layers are of another form")
    if lack := form.kernels_lack or what_is_not_understood(config, form):
        raise OtherDecoderError(lack)
    try:
        return _read(config, form)
    except (KeyError, TypeError, ValueError) as error:
        reason = f"{error.args[0]} is left to a default" if isinstance(error, KeyError) else str(error)
        raise OtherDecoderError(reason) from None


def what_is_not_understood(config: Config, form: ArchitectureSpec) -> str | None:
    """Return which value of the config the kernels do not support, or None if they support all."""
    known = {name for name, is_windowed in IS_WINDOWED.items() if form.windows or not is_windowed}
    known |= set() if form.mixer is None else ATTENDING | RECURRENT | STATELESS
    known |= form.indexed_types
    if others := set(map(str, config.get("layer_types") or ())) - known:
        return f"its layers have {', '.join(sorted(others))}"
    one_meaning = ONE_MEANING | dict(form.one_meaning) | ({} if form.windows else NO_WINDOWS)
    for part in (form.experts, form.mixer):
        one_meaning |= {} if part is None else dict(part.one_meaning)
    for key, value in config.items():
        if key in one_meaning and key not in form.caps.values() and not _is_said(value, one_meaning[key]):
            return f"its {key} is {value!r:.80}"
    activation_key = [] if form.activation_key is None else [form.activation_key]
    if unsaid := [key for key in (*sorted(form.one_meaning), *activation_key) if key not in config]:
        return f"its {unsaid[0]} is left to a default"
    for key in activation_key:
        if str(config[key]) not in form.activations:
            return f"its {key} is {config[key]!r:.80}"
    unknown = sorted(key for key in set(config) - _known_keys(form) if _may_matter(key, config[key], form))
    return f"its config has {shown(unknown[0])}, which may change a layer" if unknown else None


def _is_said(value: Any, meant: tuple[Any, ...]) -> bool:
    """Return whether a value, or every value of a list, is in `meant`."""
    return value in meant or (isinstance(value, list) and bool(value) and all(each in meant for each in value))


def _known_keys(form: ArchitectureSpec) -> set[str]:
    known = SIZES | set(ONE_MEANING | NO_WINDOWS) | SAID_ELSEWHERE | {*form.own_rules(), *form.one_meaning}
    return known | ({*OF_EXPERTS, *form.experts.one_meaning} if form.experts else set())


def _may_matter(key: str, value: Any, form: ArchitectureSpec) -> bool:
    """Return whether an unknown key may change a layer.

    Only numbers may; strings and booleans belong to other tools.
    """
    beginnings = (*form.known_keys, *(form.mixer.known_keys if form.mixer else ()))
    if key.startswith(beginnings) or key.endswith(("_token_id", "_token_ids")):
        return False
    numbers = value if isinstance(value, list) else [value]
    return any(isinstance(each, int | float) and not isinstance(each, bool) for each in numbers)


def kernel_config(config: Config) -> DecoderConfig | None:
    """Read a text model's config, or return None if the kernels do not run the model."""
    try:
        return read_decoder_config(config)
    except OtherDecoderError:
        return None


def refuse_other_tensors(dense: DecoderConfig, stored: set[str]) -> None:
    """Raise OtherDecoderError if a model's tensors are not those that its config implies."""
    if dense.num_layers > len(stored):
        raise OtherDecoderError(f"it stores {len(stored)} tensors, fewer than its {dense.num_layers:,} layers")
    if different := sorted(dense.tensor_names(stored) ^ stored):
        raise OtherDecoderError(f"its tensors are others, {different[0]} among them")


def _read(config: Config, form: ArchitectureSpec) -> DecoderConfig:
    """Read a config. Raises KeyError for numbers that the config omits, ValueError for unsupported ones."""
    latent = None if form.latent is None else form.latent.read(config)
    sizes = _sizes(config, form, latent)
    head_dim = sizes["head_dim"] if latent is None else latent.sizes.rope_dim
    own_heads, keys_are_values = _own_heads(config, form, sizes)
    full_dim = own_heads.head_dim if own_heads else head_dim  # in layers without a window
    num_rotary_dims = num_rotary_dims_of(config, form, full_dim)
    if not isinstance(config[form.epsilon_key], float):
        raise ValueError(f"its {form.epsilon_key} is {config[form.epsilon_key]!r:.80}")
    windows = (form.windows or no_windows)(config)
    attending, mixer, experts = attending_layers(config), _mixer(config, form), read_moe(config, form.experts)
    linears, qk_norms = form.linears, form.qk_norms(config) if latent is None else latent.norms
    if latent is not None:
        linears = latent.linears | {role: name for role, name in linears.items() if role in ROLES}
    return DecoderConfig(
        **sizes,
        epsilon=config[form.epsilon_key],
        rotary=own_rotary(config, form, full_dim, num_rotary_dims),
        is_tied=bool(config.get("tie_word_embeddings", False)),
        form=form,
        biased=form.biased(config),
        activation=form.activation(config),
        num_rotary_dims=min(num_rotary_dims, head_dim),
        attending=attending,
        mlp_widths=tuple(_mlp_widths(config, form, attending, mixer, experts)),
        nope_layers=form.nope(config, windows) if form.nope else frozenset(),
        windows=that_hide(windows, config),
        other_rotary=other_rotary_of(config, form, head_dim, min(num_rotary_dims, head_dim)),
        other_layers=other_layers_of(config, form, windows),
        scales=_scales(config, form, latent),
        caps={what: 0.0 if config[key] is None else number_of(config, key) for what, key in form.caps.items()},
        qk_norms=qk_norms,
        experts=experts,
        mixer=mixer,
        latent=latent,
        streams=None if form.streams is None else form.streams.read(config),
        own_heads=own_heads,
        own_layers=form.own_heads.layers(config, windows) if form.own_heads else frozenset(),
        value_dim=_value_dim(config, form, head_dim),
        shared_keys=_shared_keys(config, form, windows, own_heads),
        ple_dim=0 if form.ple_key is None else _ple_dim(config, form.ple_key),
        keys_are_values=keys_are_values,
        linear_names=linears,
        has_head_bias=form.head_bias is not None and bool(config.get(form.head_bias, False)),
    )


def _scales(config: Config, form: ArchitectureSpec, latent: MLAConfig | None) -> dict[str, float]:
    found = dict(form.fixed_scales) if latent is None else {"scores": latent.scale}
    found |= {what: number_of(config, key) for what, key in form.scales.items()}
    for key, names in form.scale_lists.items():
        found |= dict(zip(names, map(float, POSITIVE.list_of(len(names)).of(config, key)), strict=True))
    return found


def _own_heads(config: Config, form: ArchitectureSpec, sizes: dict[str, int]) -> tuple[LayerHeads | None, bool]:
    """Return the heads of layers without a window, None if they are the model's, and whether their keys are values."""
    if form.own_heads is None:
        return None, False
    heads, keys_are_values = form.own_heads.read(config)
    if fault := heads.fault(sizes["num_heads"], sizes["head_dim"]):
        raise ValueError(fault)
    is_same = heads == LayerHeads(sizes["num_kv_heads"], sizes["head_dim"])
    return None if is_same else heads, keys_are_values


def _shared_keys(config: Config, form: ArchitectureSpec, windows: Windows, own: LayerHeads | None) -> dict[int, int]:
    found = layers_of_keys(config, windows, form.shared_keys_key)
    if found and own is None:
        raise ValueError(f"its {form.shared_keys_key} is {len(found)}, and all layers have heads of one size")
    return found


def _value_dim(config: Config, form: ArchitectureSpec, head_dim: int) -> int:
    """Return the width of a head's values, or 0 if it is that of keys. Raises KeyError or ValueError."""
    if form.value_dim_key is None:
        return 0
    width: int = SIZE.of(config, form.value_dim_key)
    if width % LANES or width > head_dim:
        raise ValueError(f"its {form.value_dim_key} is {width}, beside heads of {head_dim}")
    return 0 if width == head_dim else width


def _ple_dim(config: Config, key: str) -> int:
    """Return the width of per-layer embeddings. Raises KeyError or ValueError."""
    width: int = COUNT.of(config, key)
    if width % LANES:
        raise ValueError(f"its {key} is {width}, no multiple of {LANES}")
    if width and config["vocab_size_per_layer_input"] != config["vocab_size"]:
        raise ValueError(f"its vocab_size_per_layer_input is {config['vocab_size_per_layer_input']!r:.80}")
    return width


def _mixer(config: Config, form: ArchitectureSpec) -> RecurrentConfig | None:
    found = None
    if form.mixer is not None:
        found = read_recurrent_layers(config, form.mixer, layer_types(config) or [], recurrent_shape(config))
    if form.does_one_thing and found is None:
        raise ValueError("none of its layers has a state")
    return found


def _mlp_widths(
    config: Config,
    form: ArchitectureSpec,
    attending: frozenset[int],
    mixer: RecurrentConfig | None,
    experts: MoEConfig | None,
) -> Iterator[int]:
    mixing = attending | (frozenset() if mixer is None else mixer.layers)
    own = None if form.widths is None else form.widths(config)
    for number in range(config["num_hidden_layers"]):
        if experts is not None and number in experts.layers:
            yield experts.shared_width
        elif form.does_one_thing and number in mixing:
            yield 0
        else:
            yield form.intermediate(config) if own is None else own[number]


def _sizes(config: Config, form: ArchitectureSpec, latent: MLAConfig | None) -> dict[str, int]:
    sizes = {
        "num_layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"] if latent is None else 1,
        "head_dim": _head_dim(config, form) if latent is None else latent.sizes.entry_dim,
        "intermediate": form.intermediate(config),
        "vocab": config["vocab_size"],
    }
    if fault := sizes_fault(**sizes, latent=None if latent is None else latent.sizes):
        raise ValueError(fault)
    return sizes


def _head_dim(config: Config, form: ArchitectureSpec) -> int:
    head_dim = config.get("head_dim")
    if head_dim is None and not form.defaults_head_dim:
        head_dim = config["hidden_size"] // config["num_attention_heads"]
    if not isinstance(head_dim, int):
        raise ValueError("transformers tells more of it")
    return head_dim
