"""Read what our kernels need to know of a dense decoder from its config alone, and tell what keeps them from it.

A config is taken only if all that it says is understood here; any other goes through `transformers`. Nothing here
needs torch: the driver asks, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from swiftbatch.worker.kernels.kernel_sizes import MLASizes, sizes_fault
from swiftbatch.worker.kernels.layer_specs import Activation
from swiftbatch.worker.kernels.rope_scaling import Rotary
from swiftbatch.worker.model.architectures.attention_layers import MLAConfig, Windows, read_mla, that_hide
from swiftbatch.worker.model.architectures.dense_models import DECODER_ARCHITECTURES
from swiftbatch.worker.model.architectures.moe_layers import MoEConfig, read_moe
from swiftbatch.worker.model.architectures.recurrent_layers import RecurrentConfig, read_recurrent_layers
from swiftbatch.worker.model.architectures.rope_angles import num_rotary_dims_of, other_layers, other_rotary, own_rotary
from swiftbatch.worker.model.architectures.spec import ALWAYS, ATTENTION, ArchitectureSpec
from swiftbatch.worker.model.config_value_rules import number_of, numbers_of
from swiftbatch.worker.model.text_config import EMBEDDING, HEAD, HEAD_BIAS
from swiftbatch.worker.model.unsupported_keys import what_is_not_understood

SINKS = "self_attn.sinks"
MLP_LINEARS = ("gate", "up", "down")  # the roles of a layer's products behind its attention


@dataclass(frozen=True)
class DecoderConfig:
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
    form: ArchitectureSpec
    parts: tuple[str, ...]  # the tensors of a layer without experts, no more and no less
    activation: Activation
    num_rotary_dims: int  # dimensions of a head that are turned
    nope_layers: frozenset[int]  # that turn no heads
    windows: Windows
    other_rotary: Rotary | None  # of some layers, as those that have windows, where these have one of their own
    other_layers: frozenset[int]
    scales: Mapping[str, float]  # of `Form.scales`; of scores, 1 is none
    caps: Mapping[str, float]  # of `Form.caps`; 0 is none
    qk_norms: Mapping[str, str]  # their names by their roles
    experts: MoEConfig | None
    mixer: RecurrentConfig | None
    latent: MLAConfig | None
    linear_names: Mapping[str, str]  # of a layer without experts, by their roles
    has_head_bias: bool

    @property
    def head_order(self) -> list[int] | None:
        """Return the places of the kernels' dimensions of a head in the stored one; None where they are the same.

        The kernels turn pairs half a head apart, so other pairs are brought there. What is not turned stands in pairs,
        too, whose angle is 0.
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

    def widths(self, number: int) -> dict[str, int]:
        """Rows of a layer's linear layers that some kinds store as one."""
        keys, width = self.num_kv_heads * self.head_dim, self.intermediate
        if self.experts is not None and number in self.experts.layers:
            width = self.experts.shared_width
        return {"query": self.num_heads * self.head_dim, "key": keys, "value": keys, "gate": width, "up": width}

    def attends(self, number: int) -> bool:
        """Tell whether a layer has keys and values."""
        return self.mixer is None or number in self.mixer.attending

    def has_mlp(self, number: int) -> bool:
        """Tell whether a layer has products or experts behind its attention or its mixer, or has them alone."""
        mixes = self.mixer is not None and number in self.mixer.layers
        return not self.form.does_one_thing or not (mixes or self.attends(number))

    def linears(self, number: int) -> dict[str, str]:
        """The names of a layer's linear layers by their roles; of one with experts, those that all rows meet."""
        has = {True: self.attends(number), False: self.has_mlp(number)}
        names = {role: name for role, name in self.linear_names.items() if has[role in ATTENTION]}
        if self.experts is None or number not in self.experts.layers:
            return names
        shared = (self.experts.names.shared or {}) if self.experts.shared_width else {}
        return {role: name for role, name in names.items() if role not in MLP_LINEARS} | dict(shared)

    def tensor_names(self, stored: set[str]) -> set[str]:
        """The names of all tensors, where some of them may be stored in more than one way."""
        names = {name for number in range(self.num_layers) for name in self._layer_names(number, stored)}
        of_the_model = {EMBEDDING, *self.form.norm_tensors(self.form.final_norm)}
        of_the_model |= (set() if self.is_tied else {HEAD}) | ({HEAD_BIAS} if self.has_head_bias else set())
        return names | of_the_model

    def _layer_names(self, number: int, stored: set[str]) -> Iterator[str]:
        prefix, linears, own = f"model.layers.{number}.", self.linear_names, self.linears(number)
        of_attention = {SINKS, *(f"{part}.weight" for part in self.qk_norms.values())}
        for part in self.parts:
            if part in of_attention and not self.attends(number):
                continue
            stem, _, what = part.rpartition(".")
            roles = [role for role, name in linears.items() if name == stem]
            yield from (f"{prefix}{own[role]}.{what}" for role in roles if role in own)
            if not roles:
                yield prefix + part
        if self.mixer is not None and number in self.mixer.layers:
            yield from (prefix + part for part in self.mixer.parts())
        if self.experts is not None and number in self.experts.layers:
            yield from (prefix + part for part in self.experts.parts(self.experts.is_fused(stored, prefix)))


class OtherDecoderError(ValueError):
    """A decoder that the kernels do not take; its text says why, in words for the user."""


def has_experts(form: ArchitectureSpec, config: Mapping[str, Any]) -> bool:
    """Tell whether layers of this kind have experts: some kinds are published with none, too."""
    return form.experts is not None and config.get("num_local_experts") != 0


def read_decoder_config(config: dict[str, Any]) -> DecoderConfig:
    """Read a text model's config. Raises OtherDecoderError for one that is left to `transformers`."""
    if lack := what_is_not_understood(config):
        raise OtherDecoderError(lack)
    try:
        return _read(config)
    except (KeyError, TypeError, ValueError) as error:
        reason = f"{error.args[0]} is left to a default" if isinstance(error, KeyError) else str(error)
        raise OtherDecoderError(reason) from None


def latent_sizes(config: dict[str, Any]) -> MLASizes | None:
    """The sizes of latent attention as the kernels run a text model; None where they do not."""
    try:
        latent = read_decoder_config(config).latent
    except OtherDecoderError:
        return None
    return None if latent is None else latent.sizes


def kernel_windows(config: dict[str, Any]) -> Windows:
    """The windows of a text model's layers as the kernels run it; none where they do not."""
    try:
        return read_decoder_config(config).windows
    except OtherDecoderError:
        return ()


def refuse_other_tensors(dense: DecoderConfig, stored: set[str]) -> None:
    """Raise OtherDecoderError where a model stores other tensors than those of its config."""
    if dense.num_layers > len(stored):
        raise OtherDecoderError(f"it stores {len(stored)} tensors, fewer than its {dense.num_layers:,} layers")
    if different := sorted(dense.tensor_names(stored) ^ stored):
        raise OtherDecoderError(f"its tensors are others, {different[0]} among them")


def _read(config: dict[str, Any]) -> DecoderConfig:
    """Raises KeyError or ValueError for numbers left to a default, or that the kernels do not take."""
    form = DECODER_ARCHITECTURES[config["model_type"]]
    latent = None if form.latent is None else read_mla(config, form.latent)
    sizes = _sizes(config, latent)
    head_dim = sizes["head_dim"] if latent is None else latent.sizes.rope_dim
    num_rotary_dims = num_rotary_dims_of(config, form, head_dim)
    if not isinstance(config[form.epsilon_key], float):
        raise ValueError(f"its {form.epsilon_key} is {config[form.epsilon_key]!r:.80}")
    windows = form.windows(config) if form.windows else (None,) * sizes["num_layers"]
    linears, qk_norms = form.linears, form.qk_norms(config) if latent is None else latent.norms
    if latent is not None:
        linears = latent.linears | {role: name for role, name in linears.items() if role in MLP_LINEARS}
    return DecoderConfig(
        **sizes,
        epsilon=config[form.epsilon_key],
        rotary=own_rotary(config, form, head_dim, num_rotary_dims),
        is_tied=_is_tied(config),
        form=form,
        parts=tuple(_parts(config, form, linears, qk_norms)),
        activation=form.activation(config),
        num_rotary_dims=num_rotary_dims,
        nope_layers=form.still(config, windows) if form.still else frozenset(),
        windows=that_hide(windows, config),
        other_rotary=other_rotary(config, form, head_dim),
        other_layers=other_layers(config, form, windows),
        scales=_scales(config, form, latent),
        caps={what: 0.0 if config[key] is None else number_of(config, key) for what, key in form.caps.items()},
        qk_norms=qk_norms,
        experts=read_moe(config, form.experts) if form.experts and has_experts(form, config) else None,
        mixer=_mixer(config, form),
        latent=latent,
        linear_names=linears,
        has_head_bias=form.head_bias is not None and bool(config.get(form.head_bias, False)),
    )


def _scales(config: dict[str, Any], form: ArchitectureSpec, latent: MLAConfig | None) -> dict[str, float]:
    of_scores = {} if latent is None else {"scores": latent.scale}
    said = {what: number_of(config, key) for what, key in form.scales.items()}
    return of_scores | said | _listed_scales(config, form)


def _mixer(config: dict[str, Any], form: ArchitectureSpec) -> RecurrentConfig | None:
    """Raises KeyError or ValueError, also where layers that do one thing each are left to those with products."""
    found = None if form.mixer is None else read_recurrent_layers(config, form.mixer)
    if form.does_one_thing and found is None:
        raise ValueError("none of its layers has a state")
    return found


def _listed_scales(config: dict[str, Any], form: ArchitectureSpec) -> dict[str, float]:
    """Raises KeyError or ValueError for lists that are left to a default, or of other lengths."""
    found: dict[str, float] = {}
    for key, names in form.scale_lists.items():
        found |= dict(zip(names, numbers_of(config, key, len(names)), strict=True))
    return found


def _sizes(config: dict[str, Any], latent: MLAConfig | None) -> dict[str, int]:
    """Raises KeyError, TypeError or ValueError for sizes that the kernels do not take."""
    of_cache = (config["num_key_value_heads"], _head_dim(config)) if latent is None else (1, latent.sizes.entry_dim)
    sizes = {
        "num_layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": of_cache[0],
        "head_dim": of_cache[1],
        "intermediate": DECODER_ARCHITECTURES[config["model_type"]].intermediate(config),
        "vocab": config["vocab_size"],
    }
    if fault := sizes_fault(**sizes, latent=None if latent is None else latent.sizes):
        raise ValueError(fault)
    return sizes


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


def _parts(
    config: dict[str, Any], form: ArchitectureSpec, names: Mapping[str, str], qk_norms: Mapping[str, str]
) -> list[str]:
    """The tensors of a layer with linear layers and norms of heads of these names."""
    parts = [tensor for part in form.norms.values() for tensor in form.norm_tensors(part)]
    parts += [f"{part}.weight" for part in dict.fromkeys(names.values())] + list(form.curve)
    parts += dict.fromkeys(f"{names[role]}.bias" for role in _biased(config, form) if role in names)
    parts += [SINKS] if form.has_sinks else []
    return parts + [f"{part}.weight" for part in qk_norms.values()]


def _biased(config: dict[str, Any], form: ArchitectureSpec) -> list[str]:
    """The linear layers that have a bias."""

    def has(key: str | None) -> bool:
        return key == ALWAYS or (key is not None and bool(config.get(key, False)))

    roles = ["query", "key", "value"] * has(form.query_key_value_bias) + ["output"] * has(form.output_bias)
    return roles + ["gate", "up", "down"] * has(form.mlp_bias)
