"""MiMo-V2-Flash: values are narrower than keys, and layers with windows have more heads of keys, and sinks.

Without torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from swiftbatch.worker.model.architectures.attention_layers import HeadsInWindows, by_layer_types
from swiftbatch.worker.model.architectures.moe_layers import (
    SCORED_BY_SIGMOID,
    MoETensorNames,
    SparseOr,
    all_but_the_first,
)
from swiftbatch.worker.model.architectures.spec import ArchitectureSpec, WindowAngles
from swiftbatch.worker.model.config_values import POSITIVE, SIZE, Config

ANGLES = WindowAngles(5e6, 1e4)
SHARE = 0.334  # of a head's dimensions that are rotated
KINDS_OF_LAYERS = {"layer_types": ("full_attention", "sliding_attention"), "mlp_layer_types": ("dense", "sparse")}
PUBLISHED = {"layer_types": "hybrid_layer_pattern", "mlp_layer_types": "moe_layer_freq"}  # lists of 0 and 1


def as_its_class_reads(config: Config) -> dict[str, Any]:
    """Return the config with the keys of its class in transformers in place of the published ones."""
    view = dict(config)
    if (num_before := view.pop("sliding_window_size", None)) is not None:
        view["sliding_window"] = num_before + 1 if isinstance(num_before, int) else num_before  # and a row's own
    if (epsilon := view.pop("layernorm_epsilon", None)) is not None:
        view = {"rms_norm_eps": epsilon} | view
    for key, published in PUBLISHED.items():
        said = view.get(published)
        named = [KINDS_OF_LAYERS[key][each] for each in said if each in (0, 1)] if isinstance(said, list) else None
        if named is not None and view.get(key) in (None, named):
            view[key] = named
            del view[published]
    if view.get("rope_parameters") is None and "rope_theta" in view:
        thetas = (
            view.pop(key, default)
            for key, default in (("rope_theta", ANGLES.full), ("swa_rope_theta", ANGLES.windowed))
        )
        said = {"rope_type": "default", "partial_rotary_factor": view.pop("partial_rotary_factor", SHARE)}
        view["rope_parameters"] = {
            layers: said | {"rope_theta": theta}
            for layers, theta in zip(KINDS_OF_LAYERS["layer_types"], thetas, strict=True)
        }
    return view | ({"routed_scaling_factor": 1.0} if view.get("routed_scaling_factor", 1.0) is None else {})


MIMO_V2_FLASH = ArchitectureSpec(
    partial_rotary_factor=SHARE,
    windows=by_layer_types,
    window_angles=ANGLES,
    own_heads=HeadsInWindows("swa_num_key_value_heads", 2, ("num_attention_heads", "head_dim", "v_head_dim")),
    value_dim_key="v_head_dim",
    scales={"value_scale": "attention_value_scale"},
    sinks="self_attn.attention_sink_bias",
    sinks_in_windows=True,
    experts=replace(
        SCORED_BY_SIGMOID,
        layers=SparseOr(all_but_the_first),
        names=MoETensorNames(choice_bias="mlp.gate.e_score_correction_bias"),
        num_shared=None,
        keys={},
        one_meaning={
            "add_full_attention_sink_bias": (False,),
            "add_swa_attention_sink_bias": (True,),
            "attention_bias": (False,),
            "n_shared_experts": (None, 0),
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
        },
    ),
    known_keys=("attention_chunk_size", "swa_"),
    defaults={"routed_scaling_factor": 1.0},
    rules={"layernorm_epsilon": POSITIVE, "sliding_window_size": SIZE},
    view=as_its_class_reads,
    kernels_alone="values narrower than keys, and sinks in windows alone",
)
