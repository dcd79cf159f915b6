"""A published MTP layer, which predicts one more token. Without torch.

The layer's input combines the target's final hidden state with the next token's embedding. The rest is a normal layer
of the architecture, which is read as a model of one layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiftbatch.worker.kernels.layer_specs import NormForm
from swiftbatch.worker.model.architectures.catalogue import layer_types, needs_indexers
from swiftbatch.worker.model.architectures.nas_blocks import nas_blocks
from swiftbatch.worker.model.config_values import Config, shown
from swiftbatch.worker.model.decoder_config import (
    DecoderConfig,
    OtherDecoderError,
    read_decoder_config,
    refuse_other_tensors,
)
from swiftbatch.worker.model.digests import weight_files
from swiftbatch.worker.model.file_checks import PICKLED
from swiftbatch.worker.model.formats.contract import FormatError, StoredTensor
from swiftbatch.worker.model.formats.layout import Layout, format_of, heads_in, layout_of
from swiftbatch.worker.model.gguf.gguf_model import SUFFIX
from swiftbatch.worker.model.text_config import EMBEDDING, HEAD, LAYER, PREDICTORS, WHOLE_DECODER

OWN = "predictor."  # prefix of the names of what precedes the layer, and of the norm after it
ROLES = ("token_norm", "hidden_norm", "join", "final_norm")
ONE_LAYER = "model.layers.0."
ONE_OF_ITS_KIND: dict[str, Any] = {  # keys that count layers, with their values for a model of this one layer
    "decoder_sparse_step": 1,
    "first_k_dense_replace": 0,
    "mlp_only_layers": [],
    "num_nextn_predict_layers": 0,
}
OF_LAYERS = ("hybrid_override_pattern", "layers_block_type", "layer_types")


@dataclass(frozen=True)
class MTPSpec:
    """The names of a published MTP layer; `{}` is the number of the target's layers."""

    layer: str  # prefix of the names in its layer
    names: Mapping[str, str]  # `ROLES` -> names of the parts outside the layer
    copies: tuple[str, ...] = ()  # copies of the target's embedding and head
    is_hidden_first: bool = False  # the hidden state's columns of `join` precede the embedding's
    feeds_normed: bool = True  # the next row of a draft gets the output after the norm, not before it


def _named(prefix: str, *names: str) -> dict[str, str]:
    return {role: prefix + name for role, name in zip(ROLES, names, strict=True)}


FORMS = (
    MTPSpec("mtp.layers.0.", _named("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")),  # Qwen
    MTPSpec(  # MiMo
        "model.mtp_layers.0.",
        _named("model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        is_hidden_first=True,
    ),
    MTPSpec(  # DeepSeek V3, GLM-4.5 and later
        "model.layers.{}.",
        _named("model.layers.{}.", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
        copies=("model.layers.{}.embed_tokens.weight", "model.layers.{}.shared_head.head.weight"),
        feeds_normed=False,
    ),
)
TRAINED = MTPSpec(ONE_LAYER, _named(OWN, *ROLES))
"""As our own training writes it."""


@dataclass(frozen=True)
class Predictor:
    """The tensors of an MTP layer, named as those of a model of one layer."""

    dense: DecoderConfig  # configuration of that model
    layout: Layout  # with the names in that model; those of `ROLES` begin with `OWN`
    names: Mapping[str, str]  # stored name -> name in that model
    is_hidden_first: bool
    feeds_normed: bool


class NoPredictorError(ValueError):
    """A model has no usable MTP layer. The text says why, or is empty if the model has none."""


def one_layer_config(config: Config) -> dict[str, Any]:
    """Return the config of a model of one attention layer, derived from a text model's config."""
    one = {key: ONE_OF_ITS_KIND.get(key, value) for key, value in config.items() if key not in OF_LAYERS}
    one["num_hidden_layers"] = 1
    if "block_configs" in config:
        whole = [number for number, block in enumerate(nas_blocks(config)) if block.group and block.width]
        one["block_configs"] = [config["block_configs"][number] for number in whole[:1]]
    return one if layer_types(config) is None else one | {"layer_types": ["full_attention"]}


def predictor_in(path: Path, config: Config) -> Predictor:
    """Find the first MTP layer in a model's folder. Raises NoPredictorError."""
    files = weight_files(path)
    if any(file.suffix in (SUFFIX, PICKLED) for file in files):  # none was published with such a layer
        raise NoPredictorError("")
    try:
        return predictor_of([pair for file in files for pair in heads_in(file).items()], config, path)
    except FormatError as error:
        raise NoPredictorError(str(error)) from None


def predictor_of(stored: Iterable[tuple[str, StoredTensor]], config: Config, path: Path) -> Predictor:
    """Find the first MTP layer among stored tensors. Raises NoPredictorError."""
    heads, num_layers = dict(stored), config.get("num_hidden_layers") or 0
    plain = {name: _plain(name) for name in heads}
    further = {name: each for name, each in plain.items() if _is_further(each, num_layers)}
    for form in (*FORMS, TRAINED):
        prefix = form.names["join"].format(num_layers) + "."
        if any(each.startswith(prefix) for each in (plain if form is TRAINED else further).values()):
            return _read(form, {name: heads[name] for name in further or plain}, plain, config, path)
    raise NoPredictorError("their form is not known here" if further else "")


def _plain(name: str) -> str:
    name = WHOLE_DECODER.sub("model.", name).removeprefix("language_model.")
    return name.removeprefix("model.") if name.startswith("model.mtp.") else name


def _is_further(name: str, num_layers: int) -> bool:
    number = LAYER.match(name)
    return bool(PREDICTORS.match(name)) or (number is not None and int(number[1]) >= num_layers > 0)


def _read(
    form: MTPSpec, heads: dict[str, StoredTensor], plain: Mapping[str, str], config: Config, path: Path
) -> Predictor:
    """Read an MTP layer with these names. Raises NoPredictorError if its tensors do not fit."""
    if needs_indexers(config):
        raise NoPredictorError("their rows would attend to keys that an indexer chooses")
    num_layers = config.get("num_hidden_layers") or 0
    names = {name: each for name in heads if (each := _own_name(plain[name], form, num_layers)) is not None}
    one = one_layer_config(config)
    try:
        dense = read_decoder_config(one)
        layout = _layout([(each, heads[name]) for name, each in names.items()], one, path)
        own = {f"{OWN}{role}.weight" for role in ROLES}
        if different := sorted(own - set(layout.heads)):
            raise NoPredictorError(f"{different[0].removeprefix(OWN)} is missing")
        _refuse_other_shapes(layout, dense.hidden)
        if dense.form.norm_form not in (NormForm.TWICE, NormForm.ONCE, NormForm.ONE_MORE):
            raise NoPredictorError("its norms are of distances from a mean")
        of_the_target = {EMBEDDING, *dense.form.norm_tensors(dense.form.final_norm), *([] if dense.is_tied else [HEAD])}
        refuse_other_tensors(dense, (set(layout.heads) - own) | of_the_target)
    except (OtherDecoderError, FormatError) as error:
        raise NoPredictorError(str(error)) from None
    return Predictor(dense, layout, names, form.is_hidden_first, form.feeds_normed)


def _refuse_other_shapes(layout: Layout, hidden: int) -> None:
    expected: dict[str, tuple[int, ...]] = dict.fromkeys(ROLES, (hidden,)) | {"join": (hidden, 2 * hidden)}
    for role, shape in expected.items():
        if (found := layout.heads[f"{OWN}{role}.weight"].shape) != shape:
            raise NoPredictorError(f"{role}.weight is {list(found)}; expected {list(shape)}")


def _layout(heads: list[tuple[str, StoredTensor]], config: dict[str, Any], path: Path) -> Layout:
    try:
        return layout_of(heads, config, format_of(config, path))
    except FormatError:
        return layout_of(heads, config, None)


def _own_name(name: str, form: MTPSpec, num_layers: int) -> str | None:
    """Return the name in the one-layer model, or None for copies and for later MTP layers."""
    if name in [each.format(num_layers) for each in form.copies]:
        return None
    for role in ROLES:
        prefix = form.names[role].format(num_layers) + "."
        if name.startswith(prefix):
            return f"{OWN}{role}.{name.removeprefix(prefix)}"
    layer = form.layer.format(num_layers)
    if name.startswith(layer):
        return ONE_LAYER + name.removeprefix(layer)
    if _is_a_later_one(name, layer):
        return None
    raise NoPredictorError(f"{shown(name)} is not known here")


def _is_a_later_one(name: str, layer: str) -> bool:
    stem = layer.rstrip(".").rpartition(".")[0] + "."
    return name.startswith(stem) and name.removeprefix(stem).partition(".")[0].isdecimal()
