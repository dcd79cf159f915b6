"""Finds the keys of a config that ask for what the kernels do not have. Without torch.

A config counts as understood only where each of its numbers is known: those that change no forward are named here.
"""

from __future__ import annotations

from typing import Any

from swiftbatch.worker.model.architectures.attention_layers import (
    IS_WINDOWED,
    TypesOrPattern,
    by_no_rope_layers,
    looks_at_types,
)
from swiftbatch.worker.model.architectures.attention_layers import KEYS as LATENT_KEYS
from swiftbatch.worker.model.architectures.dense_models import DECODER_ARCHITECTURES
from swiftbatch.worker.model.architectures.spec import ArchitectureSpec
from swiftbatch.worker.model.config_value_rules import shown
from swiftbatch.worker.model.layer_types import ATTENDING, RECURRENT, STATELESS
from swiftbatch.worker.model.supported_models import KERNELS_LACK

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
    "rotary_pct": (1.0,),
}
NO_WINDOWS: dict[str, tuple[Any, ...]] = {"sliding_window": (None,), "use_sliding_window": (False,)}  # as above
NOPE_KEYS = {"no_rope_layers", "no_rope_layer_interval"}  # the latter is used where the former is not said
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
    "embedding_dropout",
    "hidden_dropout",
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


def what_is_not_understood(config: dict[str, Any]) -> str | None:
    """Say what of a layer's form the kernels do not have; None for one that they have."""
    kind = config.get("model_type")
    if kind not in DECODER_ARCHITECTURES:
        return KERNELS_LACK.get(str(kind), "its layers are of another form")
    form = DECODER_ARCHITECTURES[str(kind)]
    known = {name for name, is_windowed in IS_WINDOWED.items() if looks_at_types(form.windows) or not is_windowed}
    known |= set() if form.mixer is None else ATTENDING | RECURRENT | STATELESS
    if others := set(map(str, config.get("layer_types") or ())) - known:
        return f"its layers have {', '.join(sorted(others))}"
    one_meaning = ONE_MEANING | dict(form.one_meaning) | ({} if form.windows else NO_WINDOWS)
    for part in (form.experts, form.mixer):
        one_meaning |= {} if part is None else dict(part.one_meaning)
    for key, value in config.items():
        if key in one_meaning and key not in form.caps.values() and not _is_said(value, one_meaning[key]):
            return f"its {key} is {value!r:.80}"
    if unsaid := sorted(key for key in form.one_meaning if key not in config):
        return f"its {unsaid[0]} is left to a default"
    if (lack := _what_activation_lacks(config, form)) is not None:
        return lack
    unknown = sorted(key for key, value in config.items() if _may_matter(key, value, form))
    return f"its config has {shown(unknown[0])}, which may change a layer" if unknown else None


def _what_activation_lacks(config: dict[str, Any], form: ArchitectureSpec) -> str | None:
    if (key := form.activation_key) is None:
        return None
    if key not in config:
        return f"its {key} is left to a default"
    return None if str(config[key]) in form.activations else f"its {key} is {config[key]!r:.80}"


def _is_said(value: Any, meant: tuple[Any, ...]) -> bool:
    """Tell whether a value is one of those that are meant, also where it is said layer by layer."""
    return value in meant or (isinstance(value, list) and bool(value) and all(each in meant for each in value))


def _may_matter(key: str, value: Any, form: ArchitectureSpec) -> bool:
    """Tell whether a key may be a number of a layer that is not understood here; words and switches are none.

    The classes of these kinds look at no other keys than those named above, so what is not a number is of somebody's
    tools.
    """
    known = SIZES | set(ONE_MEANING | NO_WINDOWS) | SAID_ELSEWHERE
    known |= {form.intermediate_key, form.epsilon_key, *form.one_meaning, *form.scales.values(), *form.caps.values()}
    known |= set(form.scale_lists)
    known |= set() if form.experts is None else form.experts.known_keys()
    known |= set() if form.latent is None else set(LATENT_KEYS)
    known |= NOPE_KEYS if form.still is by_no_rope_layers else set()
    known |= {form.windows.key or ""} if isinstance(form.windows, TypesOrPattern) else set()
    known |= {form.window_angles.windowed_key or ""} if form.window_angles else set()
    known |= {form.thetas_key or ""}
    beginnings = (*form.unused, *(() if form.mixer is None else form.mixer.keys))
    if key in known or key.endswith(("_token_id", "_token_ids")) or key.startswith(beginnings or ("\0",)):
        return False
    numbers = value if isinstance(value, list) else [value]
    return any(isinstance(each, int | float) and not isinstance(each, bool) for each in numbers)
