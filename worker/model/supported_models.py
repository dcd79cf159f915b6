"""The kinds of models that run here, by their `config.json`: those that were held against transformers' own forward.

A kind that nobody compared may be silently wrong, so it is refused before any job is taken in. `docs/models.md` is the
table of the kinds, written by the test that compares them. Without torch, since the driver asks, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from swiftbatch.worker.model.config_value_rules import shown
from swiftbatch.worker.model.layer_types import ATTENDING, RECURRENT, STATELESS, layer_types, num_attending_layers

SUPPORTED_ARCHITECTURES = (
    "afmoe",
    "apertus",
    "arcee",
    "bamba",
    "cohere",
    "cohere2",
    "cohere2_moe",
    "cwm",
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "exaone_moe",
    "falcon_h1",
    "flex_olmo",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "granite_swa",
    "granitemoe",
    "granitemoe_swa",
    "granitemoehybrid",
    "granitemoeshared",
    "helium",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "hy_v3",
    "internlm3",
    "iquestcoder",
    "jais2",
    "kimi_linear",
    "laguna",
    "lfm2",
    "lfm2_moe",
    "llama",
    "llama4_text",
    "mellum",
    "minimax_m2",
    "ministral",
    "ministral3",
    "mistral",
    "mixtral",
    "nemotron_h",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "phi",
    "phi3",
    "phimoe",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
    "seed_oss",
    "smollm3",
    "solar_open",
    "starcoder2",
    "vaultgemma",
)

KERNELS_LACK = {  # reasons why kinds that run here have our kernels for their attention at most
    "afmoe": "its attention has gates",
    "gpt_neox": "its norms subtract means, and its layers attend and feed forward side by side",
    "granite_swa": "its layers have sinks, and angles of their own",
    "laguna": "its attention has gates, and its layers different numbers of heads",
    "llama4_text": "its layers have experts and chunks",
    "olmo": "its norms have no weights, and subtract means",
    "phi": "its norms subtract means, and its layers attend and feed forward side by side",
}
RECURRENT_ARCHITECTURES = {  # that have layers with states, and the form of these
    "bamba": "Mamba-2",
    "falcon_h1": "Mamba-2",
    "granitemoehybrid": "Mamba-2",
    "kimi_linear": "delta attention (KDA)",
    "lfm2": "short convolutions",
    "lfm2_moe": "short convolutions",
    "nemotron_h": "Mamba-2",
    "qwen3_5_moe_text": "gated delta nets",
    "qwen3_5_text": "gated delta nets",
    "qwen3_next": "gated delta nets",
}
KERNELS_LACK |= {kind: f"its layers have states: {form}" for kind, form in RECURRENT_ARCHITECTURES.items()}
ATTENDING_LAYERS = {"attention", "full_attention", "sliding_attention", "chunked_attention"}
OTHER_LAYERS = {  # in words, beside the name that configs have for them
    "conv": "short convolutions",
    "deepseek_sparse_attention": "attention to keys that an indexer chooses",
    "linear_attention": "gated delta nets",
    "mamba": "Mamba-2",
}
MOST_NAMED = 4  # other kinds of layers, in a line
INDEXED = "attention to keys that an indexer chooses"
COMPRESSED = f"compressed keys and values, {INDEXED}, and hyper-connections"
NEEDS = {  # needs beside attention to keys and values, of kinds that users ask for
    "bloom": "position biases (ALiBi)",
    "deepseek_ref": COMPRESSED,
    "deepseek_v32": INDEXED,
    "deepseek_v4": COMPRESSED,
    "gemma4_text": "heads of two widths, and keys that serve as values",
    "glm_moe_dsa": INDEXED,
    "mimo_v2_flash": "values narrower than keys, and sinks in windows alone",
    "minimax_m3": "attention to blocks of keys that an indexer chooses",
    "mpt": "position biases (ALiBi)",
    "gpt2": "learned positions",
    "opt": "learned positions",
    "falcon_mamba": "state-space layers",
    "mamba": "state-space layers",
    "mamba2": "state-space layers",
    "rwkv": "recurrent layers",
    "recurrent_gemma": "recurrent layers",
    "nemotron-nas": "layers of different sizes, some of them without attention",
    "step3p7": "windows beside experts whose router has biases of its own",
    "nemotron": "a way past its class, which hands nothing on to its attention",
    "stablelm": "a way past its class, which hands nothing on to its attention",
}


def what_it_lacks(config: dict[str, Any]) -> str | None:
    """Say what a text model would need that is not here; None for one that runs."""
    kind = str(config.get("model_type"))
    if kind in NEEDS:
        return f"its kind {kind!r:.80} needs {NEEDS[kind]}"
    types = config.get("layer_types") or []
    if not isinstance(types, list):
        return f"its layer_types are {types!r:.80}; expected a list"
    if kind in RECURRENT_ARCHITECTURES:
        types = layer_types(config) or []
        if types and not num_attending_layers(config):
            return f"none of its {len(types)} layers attends"
    known = ATTENDING_LAYERS | (ATTENDING | RECURRENT | STATELESS if kind in RECURRENT_ARCHITECTURES else set())
    if layers := {str(layer) for layer in types} - known:
        return f"its kind {kind!r:.80} has layers of the kinds {', '.join(_named(layers))}"
    if kind not in SUPPORTED_ARCHITECTURES:
        return f"its kind {kind!r:.80} was not compared with transformers' own forward"
    return None


def _named(layers: set[str]) -> Iterator[str]:
    """The first few kinds of layers, with what they are in words."""
    for layer in sorted(layers)[:MOST_NAMED]:
        yield f"{layer} ({OTHER_LAYERS[layer]})" if layer in OTHER_LAYERS else shown(layer)
    if len(layers) > MOST_NAMED:
        yield f"and {len(layers) - MOST_NAMED:,} more"
