"""The supported architectures, by their config's `model_type`, and those that are refused. Without torch.

Every supported architecture was compared with transformers' own forward. Without this comparison its results could be
wrong.
"""

from __future__ import annotations

from collections.abc import Iterator

from swiftbatch.worker.model.architectures.attention_layers import CHOOSES, INDEXED
from swiftbatch.worker.model.architectures.hybrid import HYBRIDS
from swiftbatch.worker.model.architectures.llama_like import LLAMA_LIKE
from swiftbatch.worker.model.architectures.moe import MIXTURES
from swiftbatch.worker.model.architectures.recurrent_layers import (
    ATTENDING,
    RECURRENT,
    STATELESS,
    RecurrentShape,
    listed_layers,
)
from swiftbatch.worker.model.architectures.spec import ArchitectureSpec
from swiftbatch.worker.model.config_values import Config, shown

ARCHITECTURES = dict(sorted((LLAMA_LIKE | MIXTURES | HYBRIDS).items()))
ALIASES = {alias: kind for kind, spec in ARCHITECTURES.items() for alias in spec.aliases}
NESTED = {whole: kind for kind, spec in ARCHITECTURES.items() for whole in spec.nested_in}
MIXER_CLASSES = {
    name: spec.mixer.words for spec in ARCHITECTURES.values() if spec.mixer for name in spec.mixer.layer_classes
}
"""The words for recurrent layers, by their classes in transformers."""
GGUF_KINDS = {spec.gguf.name: kind for kind, spec in ARCHITECTURES.items() if spec.gguf}
"""The architectures by their names in GGUF files."""

HEADS_BY_LAYER = "more heads of queries in layers with windows than in others, and a gate for each head"
REFUSED = {  # `model_type` -> what it needs that is missing here; only models that users may ask for
    "bloom": "position biases (ALiBi)",
    "mpt": "position biases (ALiBi)",
    "gpt2": "learned positions",
    "opt": "learned positions",
    "falcon_mamba": "state-space layers",
    "mamba": "state-space layers",
    "mamba2": "state-space layers",
    "rwkv": "recurrent layers",
    "recurrent_gemma": "recurrent layers",
    "step3p5": HEADS_BY_LAYER,
    "step3p7": HEADS_BY_LAYER,
    "nemotron": "a way past its class, which hands nothing on to its attention",
    "stablelm": "a way past its class, which hands nothing on to its attention",
}
ATTENDING_LAYERS = {"attention", "full_attention", "sliding_attention", "chunked_attention"}
OTHER_LAYERS = {  # the names that configs use -> words for users
    "conv": "short convolutions",
    **dict.fromkeys(INDEXED, CHOOSES),
    "linear_attention": "gated delta nets",
    "mamba": "Mamba-2",
}
MOST_NAMED = 4  # most kinds of layers that one message names


def architecture_of(config: Config) -> ArchitectureSpec | None:
    """Return a text model's architecture, or None if it is not supported."""
    return ARCHITECTURES.get(str(config.get("model_type")))


def what_it_lacks(config: Config) -> str | None:
    """Return what a text model needs that is not supported, or None if everything is."""
    kind, form = str(config.get("model_type")), architecture_of(config)
    if kind in REFUSED:
        return f"its kind {kind!r:.80} needs {REFUSED[kind]}"
    types = config.get("layer_types") or []
    if not isinstance(types, list):
        return f"its layer_types are {types!r:.80}; expected a list"
    known = ATTENDING_LAYERS | (set() if form is None else form.indexed_types)
    if form is not None and form.mixer is not None:
        types, known = layer_types(config) or [], ATTENDING | RECURRENT | STATELESS
        if types and not attending_layers(config):
            return f"none of its {len(types)} layers attends"
    if layers := {str(layer) for layer in types} - known:
        return f"its kind {kind!r:.80} has layers of the kinds {', '.join(_named(layers))}"
    if form is None:
        return f"its kind {kind!r:.80} was not compared with transformers' own forward"
    return None


def needs_indexers(config: Config) -> bool:
    """Return whether a text model's rows attend to keys that an indexer chooses."""
    form = architecture_of(config)
    return form is not None and bool(form.indexed_types)


def _named(layers: set[str]) -> Iterator[str]:
    for layer in sorted(layers)[:MOST_NAMED]:
        yield f"{layer} ({OTHER_LAYERS[layer]})" if layer in OTHER_LAYERS else shown(layer)
    if len(layers) > MOST_NAMED:
        yield f"and {len(layers) - MOST_NAMED:,} more"


def layer_types(config: Config) -> list[str] | None:
    """Return the type of each layer as the config names it, or None if all layers have the same type."""
    form = architecture_of(config)
    return listed_layers(config) or (None if form is None else form.unlisted_layers(config))


def attending_layers(config: Config) -> frozenset[int]:
    """Return the layers with keys and values."""
    types = layer_types(config)
    if types is None or not set(types) & (RECURRENT | STATELESS):
        return frozenset(range(config.get("num_hidden_layers") or 0))
    return frozenset(number for number, each in enumerate(types) if each in ATTENDING)


def recurrent_shape(config: Config) -> RecurrentShape | None:
    """Return the sizes of a model's states, or None if the config has none."""
    form, num_layers = architecture_of(config), sum(each in RECURRENT for each in layer_types(config) or ())
    if form is None or form.mixer is None or not num_layers:
        return None
    try:
        return form.mixer.shape(config, num_layers)
    except (KeyError, TypeError, ValueError):
        return None
