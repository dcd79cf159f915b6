"""The text model of a published config, for all code that reads a config or a tensor's name.

Multimodal models nest the text model's keys in `text_config`, and add a prefix to its tensors.
"""

from __future__ import annotations

import re
from typing import Any

from swiftbatch.worker.model.architectures.catalogue import ALIASES, NESTED, architecture_of
from swiftbatch.worker.model.architectures.spec import OF_KEYS
from swiftbatch.worker.model.config_values import Config

OF_THE_WHOLE = ("quantization_config", "compression_config", "eos_token_id", "tie_word_embeddings")
OF_IMAGES = ("mrope_interleaved", "mrope_section")  # positions of texts are the same in all three directions
OTHER_TOWERS = re.compile(
    r"^(?:model\.)?(?:visual|vision_\w+|multi_modal_projector|patch_merge_mlp|mm_projector|audio_\w+|embed_(?:vision|audio))\."
)
PREDICTORS = re.compile(r"^(?:model\.)?(?:mtp|mtp_layers|nextn_predict_layers)\.")
OLD_ANGLES = "rotary_emb.inv_freq"  # constants that were once saved
WHOLE_DECODER, LAYER = re.compile(r"^model\.language_model\."), re.compile(r"^model\.layers\.(\d+)\.")
HEAD, HEAD_BIAS, EMBEDDING = "lm_head.weight", "lm_head.bias", "model.embed_tokens.weight"


def text_view(config: Config) -> dict[str, Any]:
    """Return the config of a model's text part, as if that were published as a model of its own."""
    view, kind = dict(config), config.get("model_type")
    if nested := nested_config(config):
        whole = {key: config[key] for key in OF_THE_WHOLE if key in config}
        kind = nested.get("model_type") or NESTED.get(str(kind))
        view = whole | nested | {key: value for key, value in whole.items() if key == "tie_word_embeddings"}
    view["model_type"] = ALIASES.get(kind, kind) if isinstance(kind, str) else kind
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(said := view.get(key), dict):
            view[key] = {name: value for name, value in said.items() if name not in OF_IMAGES}
    form = architecture_of(view)
    return view if form is None else dict(form.defaults) | form.view(view)


def nested_config(config: Config) -> dict[str, Any]:
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else {}


def is_another(config: Config) -> bool:
    """Return whether the text model's class takes the text view in place of the config."""
    form = architecture_of(config)
    lacks_class = form is not None and form.lacks_class
    return lacks_class or bool(nested_config(config)) or config.get("model_type") in ALIASES


def text_name(name: str, config: Config) -> str | None:
    """Return a stored tensor's name in the text model, or None if it does not affect text.

    These are MTP layers, towers, old constants, and the keys of layers that read those of others.

    Layers after the last one are ignored only if the config counts them as MTP layers.
    """
    if OTHER_TOWERS.match(name) or PREDICTORS.match(name) or name.endswith(OLD_ANGLES):
        return None
    name = WHOLE_DECODER.sub("model.", name).removeprefix("language_model.")
    if (form := architecture_of(config)) is not None:
        if name.startswith(form.own_decoder):
            name = "model." + name.removeprefix(form.own_decoder)
        name = EMBEDDING if name == form.own_embedding else name
        name = name if form.name_in_class is None else form.name_in_class(name)
    if number := LAYER.match(name):
        num_layers = config.get("num_hidden_layers") or 0
        num_predictors = config.get("num_nextn_predict_layers") or 0
        if _is_of_shared_keys(name, int(number[1]), config):
            return None
        return None if num_layers <= int(number[1]) < num_layers + num_predictors else name
    return name


def _is_of_shared_keys(name: str, number: int, config: Config) -> bool:
    form = architecture_of(config)
    num_shared = config.get(form.shared_keys_key) if form is not None and form.shared_keys_key else 0
    num_layers = config.get("num_hidden_layers") or 0
    is_sharing = num_layers - (num_shared or 0) <= number < num_layers
    return is_sharing and name.removeprefix(f"model.layers.{number}.").startswith(OF_KEYS)


def class_name(name: str, config: Config) -> str:
    """Return a text model's tensor name as the architecture's class in transformers has it."""
    form = architecture_of(config)
    if form is not None and form.name_in_class is not None:
        return name.removeprefix("model.")
    return form.own_embedding if name == EMBEDDING and form is not None and form.own_embedding else name


def is_of_text(name: str, config: Config) -> bool:
    """Return whether a stored tensor is loaded as part of the text model."""
    known = text_name(name, config)
    return known is not None and not (known == HEAD and bool(config.get("tie_word_embeddings")))


def is_transposed(name: str, shape: tuple[int, ...], config: Config) -> bool:
    """Return whether a model stores experts transposed, by its whole config. Newer `transformers` versions do not."""
    nested, form = nested_config(config), architecture_of(text_view(config))
    fused = form.experts.names.fused if form is not None and form.experts else None
    if not nested or fused is None or fused.is_transposed is not None or not name.endswith((fused.gate_up, fused.down)):
        return False
    hidden, width = nested.get("hidden_size"), nested.get("moe_intermediate_size")
    if name.endswith(fused.down):
        return shape[1:] == (width, hidden)
    return isinstance(width, int) and shape[1:] == (hidden, 2 * width)
