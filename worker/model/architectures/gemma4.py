"""Gemma 4: layers without a window have wider heads, and experts work beside the MLP. Without torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from swiftbatch.worker.kernels.layer_specs import NormForm, Score
from swiftbatch.worker.model.architectures.attention_layers import WINDOWED, OwnHeads, Windows, by_layer_types
from swiftbatch.worker.model.architectures.llama_like import GEMMA_NORMS, QK_NORMED, SOFTCAPS
from swiftbatch.worker.model.architectures.moe_layers import (
    SHARED_NORM,
    FusedNames,
    MoESpec,
    MoETensorNames,
    experts_in_all_layers,
    mlp_linears,
)
from swiftbatch.worker.model.architectures.spec import BEHIND, WindowAngles
from swiftbatch.worker.model.config_values import SIZE, SWITCH, WORD, Config, KeyRule

ANGLES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    WINDOWED: {"rope_type": "default", "rope_theta": 1e4},
}
OWN_HEADS = OwnHeads("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v")


def up_to_the_last(config: Config) -> Windows:
    """Return the windows of `layer_types`. Raises ValueError if the last layer has one, which its class ignores."""
    windows = by_layer_types(config)
    if windows[-1] is not None:
        raise ValueError("its last layer has a window")
    return windows


def as_published(config: Config) -> dict[str, Any]:
    """Return the config with the keys of `OWN_HEADS` in place of those that newer versions of transformers write.

    If layers have other sizes than these keys can tell, the keys are left out.
    """
    view = dict(config)
    if (by_layer := view.pop("per_layer_config", None)) is None:
        return view
    types = view.get("layer_types")
    full = {str(number) for number, each in enumerate(types or ()) if each != WINDOWED}
    found = list(by_layer.values()) if isinstance(by_layer, dict) else []
    view = {key: value for key, value in view.items() if key not in (OWN_HEADS.head_dim, OWN_HEADS.num_kv_heads)}
    is_known = found and all(each == found[0] and isinstance(each, dict) for each in found) and set(by_layer) == full
    if not is_known or set(found[0]) - {"head_dim", "num_key_value_heads"}:
        return view
    own = {key: found[0].get(key, view.get(key)) for key in ("head_dim", "num_key_value_heads")}
    return view | {OWN_HEADS.head_dim: own["head_dim"], OWN_HEADS.num_kv_heads: own["num_key_value_heads"]}


def where_enabled(config: Config) -> frozenset[int]:
    return experts_in_all_layers(config) if SWITCH.of(config, "enable_moe_block") else frozenset()


EXPERTS = MoESpec(
    Score.SOFTMAX,
    where_enabled,
    names=MoETensorNames(
        router="router.proj.weight",
        each=None,
        fused=FusedNames("experts.gate_up_proj", "experts.down_proj"),
        shared=mlp_linears("mlp"),
        norms={
            "front_norm": "pre_feedforward_layernorm_2",
            "behind_norm": "post_feedforward_layernorm_2",
            SHARED_NORM: "post_feedforward_layernorm_1",
        },
        scales={"router_scale": "router.scale", "choice_scales": "router.per_expert_scale"},
    ),
    rounds_weights=False,
    shared_width="intermediate_size",
    keys={"enable_moe_block": SWITCH},
)
GEMMA4 = replace(
    QK_NORMED,
    norms=GEMMA_NORMS | BEHIND,
    norm_form=NormForm.ONCE,
    norms_values=True,
    activation_key="hidden_activation",
    scales_by_width=True,
    fixed_scales={"scores": 1.0},
    layer_scale="layer_scalar",
    caps={"logits": SOFTCAPS["logits"]},
    windows=up_to_the_last,
    own_heads=OWN_HEADS,
    window_angles=WindowAngles(1e6, 1e4),
    experts=EXPERTS,
    one_meaning={
        "hidden_size_per_layer_input": (0,),
        "num_kv_shared_layers": (0,),
        "use_bidirectional_attention": (None, "vision"),  # images see each other, texts never look ahead
    },
    known_keys=("vocab_size_per_layer_input",),
    rules={
        **dict.fromkeys(("moe_intermediate_size", "num_experts", "top_k_experts"), SIZE.or_null()),
        "rope_parameters": KeyRule("an object", lambda value: isinstance(value, dict)),
        "use_bidirectional_attention": WORD.or_null(),
    },
    defaults={"rope_parameters": ANGLES},
    view=as_published,
    nested_in=("gemma4",),
    kernels_alone="heads of two widths, and norms of values",
    on_cpu_alone=True,
)
