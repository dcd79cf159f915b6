"""MiniMax M2, and M3, whose rows attend to blocks of keys that an indexer chooses for each head of keys.

Without torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeGuard

from swiftbatch.worker.kernels.layer_specs import NormForm, Score
from swiftbatch.worker.model.architectures.attention_layers import CHOOSES, BlockHeads
from swiftbatch.worker.model.architectures.moe_layers import (
    ROLES,
    MoESpec,
    MoETensorNames,
    SparseOr,
    experts_in_all_layers,
    mlp_linears,
)
from swiftbatch.worker.model.architectures.spec import ArchitectureSpec
from swiftbatch.worker.model.config_values import SIZE, SOME_LAYERS, Config

PART = "block_sparse_moe"
NAMES = MoETensorNames(
    router=f"{PART}.gate.weight",
    each={role: f"{PART}.experts.{{}}.w{number}.weight" for role, number in zip(ROLES, (1, 3, 2), strict=True)},
    choice_bias=f"{PART}.e_score_correction_bias",
)
ONE_MEANING: dict[str, tuple[Any, ...]] = {
    "scoring_func": ("sigmoid",),
    "use_qk_norm": (True,),
    "use_routing_bias": (True,),
}
MINIMAX_M2 = ArchitectureSpec(
    has_qk_norms=True,
    joins_heads=True,
    partial_rotary_factor=1.0,
    experts=MoESpec(
        Score.SIGMOID,
        experts_in_all_layers,
        "intermediate_size",
        NAMES,
        rounds_weights=False,
        keys={"rotary_dim": SIZE} | dict.fromkeys(("mtp_transformer_layers", "num_mtp_modules", "router_jitter_noise")),
        one_meaning=ONE_MEANING
        | {
            "attn_type_list": (1,),  # attention to all positions
            "shared_intermediate_size": (0,),
            "qk_norm_type": ("per_layer",),
        },
    ),
)

INDEXERS = BlockHeads("minimax_m3_sparse")
OF_CHOICE = {  # published keys within `sparse_attention_config` -> those of its class in transformers
    "sparse_num_index_heads": "index_n_heads",
    "sparse_index_dim": "index_head_dim",
    "sparse_block_size": "index_block_size",
    "sparse_topk_blocks": "index_topk_blocks",
    "sparse_local_block": "index_local_blocks",
}
OF_ONE_MEANING = {"sparse_init_block": 0, "sparse_score_type": "max", "use_sparse_attention": True}


def as_its_class_reads(config: Config) -> dict[str, Any]:
    """Return the config with the keys of its class in transformers in place of the published ones.

    What has another meaning stays as it is, and is refused.
    """
    view = dict(config)
    for read in (_with_indexers, _with_experts, _with_rotation):
        read(view)
    if view.get("hidden_act") == "swigluoai":
        view["hidden_act"] = "silu"  # of clamped gates
    return view


def _with_indexers(view: dict[str, Any]) -> None:
    said = view.pop("sparse_attention_config", None)
    left = dict(said) if isinstance(said, dict) else said
    if isinstance(left, dict):
        is_sparse = left.get("sparse_attention_freq")
        if view.get("layer_types") is None and _says(is_sparse):
            view["layer_types"] = [INDEXERS.layer_type if each else "full_attention" for each in is_sparse]
            del left["sparse_attention_freq"]
            if left.get("sparse_disable_index_value") == is_sparse:
                del left["sparse_disable_index_value"]
        view |= {name: left.pop(key) for key, name in OF_CHOICE.items() if key in left and name not in view}
        left = {key: each for key, each in left.items() if key not in OF_ONE_MEANING or each != OF_ONE_MEANING[key]}
    if left:
        view["sparse_attention_config"] = left


def _with_experts(view: dict[str, Any]) -> None:
    has_experts = view.get("moe_layer_freq")
    if view.get("mlp_layer_types") is None and _says(has_experts):
        view["mlp_layer_types"] = ["sparse" if each else "dense" for each in has_experts]
        del view["moe_layer_freq"]
    types, num_dense = view.get("mlp_layer_types"), view.get("first_k_dense_replace")
    if _says(has_experts) and SOME_LAYERS.holds(num_dense) and types == _behind_the_first(num_dense, len(has_experts)):
        del view["first_k_dense_replace"]
    if "moe_intermediate_size" in view and view["moe_intermediate_size"] == view.get("intermediate_size"):
        del view["moe_intermediate_size"]


def _behind_the_first(num_dense: Any, num_layers: int) -> list[str]:
    return ["sparse" if number >= num_dense else "dense" for number in range(num_layers)]


def _says(layers: Any) -> TypeGuard[list[int]]:
    """Return whether a list says 0 or 1 of each layer."""
    return isinstance(layers, list) and all(type(each) is int and each in (0, 1) for each in layers)


def _with_rotation(view: dict[str, Any]) -> None:
    """Drop `rotary_dim` where it repeats the share of a head that is rotated."""
    share = (view.get("rope_parameters") or view).get("partial_rotary_factor", 1.0)
    sizes = view.get("rotary_dim"), view.get("head_dim")
    if all(map(SIZE.holds, sizes)) and isinstance(share, float) and sizes[0] == share * view["head_dim"]:
        del view["rotary_dim"]


MINIMAX_M3 = ArchitectureSpec(
    has_qk_norms=True,
    norm_form=NormForm.ONE_MORE,
    partial_rotary_factor=1.0,
    intermediate_key="dense_intermediate_size",
    own_heads=INDEXERS,
    experts=MoESpec(
        Score.SIGMOID,
        SparseOr(experts_in_all_layers),
        "intermediate_size",
        replace(NAMES, shared=mlp_linears(f"{PART}.shared_experts")),
        scale="routed_scaling_factor",
        rounds_weights=False,
        shared_width="shared_intermediate_size",
        gate_limit="swiglu_limit",
        gate_slope="swiglu_alpha",
        keys=dict.fromkeys(("num_mtp_modules", "router_jitter_noise")),
        one_meaning=ONE_MEANING
        | {
            "attention_output_gate": (False,),
            "n_shared_experts": (1,),
            "qk_norm_type": ("per_head",),
            "sparse_attention_config": (None,),
            "use_gemma_norm": (True,),
        },
    ),
    rules={"first_k_dense_replace": SOME_LAYERS},
    view=as_its_class_reads,
    aliases=("minimax_m3",),
    nested_in=("minimax_m3_vl",),
    kernels_alone=CHOOSES,
)
