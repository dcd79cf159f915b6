"""DeepSeek's decoders, and others with the same latent attention (MLA). Kimi K2 is DeepSeek V3. Without torch."""

from __future__ import annotations

from dataclasses import replace

from swiftbatch.worker.kernels.layer_specs import Score
from swiftbatch.worker.model.architectures.attention_layers import UP, MLASpec
from swiftbatch.worker.model.architectures.moe_layers import (
    MoESpec,
    MoETensorNames,
    SparseOr,
    all_but_the_first,
    behind_the_first,
    mlp_linears,
)
from swiftbatch.worker.model.architectures.spec import NULL_HEADS, ArchitectureSpec
from swiftbatch.worker.model.config_values import SOME_LAYERS

SHARED = mlp_linears("mlp.shared_experts")
SCORED_BY_SIGMOID = MoESpec(
    Score.SIGMOID,
    behind_the_first,
    names=MoETensorNames(choice_bias="mlp.gate.e_score_correction_bias", shared=SHARED),
    normalises="norm_topk_prob",
    least_sum=1e-20,
    scale="routed_scaling_factor",
    groups=("n_group", "topk_group"),
    rounds_logits=False,
    rounds_weights=False,
    num_shared="n_shared_experts",
    keys={"first_k_dense_replace": SOME_LAYERS},
    one_meaning={"moe_layer_freq": (1,), "ep_size": (1,)},
)
WITHOUT_BIASES = SCORED_BY_SIGMOID.one_meaning | {"attention_bias": (False,), "mlp_bias": (False,)}
LATENT = MLASpec(
    linears={"key": "self_attn.kv_a_proj_with_mqa", UP: "self_attn.kv_b_proj", "output": "self_attn.o_proj"},
    queries_of_vectors={"query_down": "self_attn.q_a_proj", "query": "self_attn.q_b_proj"},
    queries_of_rows={"query": "self_attn.q_proj"},
    query_norm="self_attn.q_a_layernorm",
    key_norm="self_attn.kv_a_layernorm",
)
DEEPSEEK_V3 = ArchitectureSpec(
    latent=replace(LATENT, interleaving_key="rope_interleave"),
    experts=replace(SCORED_BY_SIGMOID, one_meaning=WITHOUT_BIASES),
    known_keys=("aux_loss_alpha", "num_mtp_layers"),
)
DEEPSEEKS: dict[str, ArchitectureSpec] = {
    "deepseek_v2": replace(
        DEEPSEEK_V3,
        latent=LATENT,
        rounds_angles=False,
        experts=MoESpec(
            Score.SOFTMAX,
            behind_the_first,
            names=MoETensorNames(shared=SHARED),
            normalises=False,
            scale="routed_scaling_factor",
            rounds_logits=False,
            rounds_weights=False,
            num_shared="n_shared_experts",
            groups=("n_group", "topk_group"),
            grouping=("topk_method", "group_limited_greedy"),
            num_best_of_group=1,
            keys=SCORED_BY_SIGMOID.keys,
            one_meaning=WITHOUT_BIASES
            | {"topk_method": ("greedy", "group_limited_greedy"), "norm_topk_prob": (False,)},
        ),
        rules=NULL_HEADS,
    ),
    "deepseek_v3": replace(DEEPSEEK_V3, rules=NULL_HEADS, aliases=("kimi_k2",), nested_in=("kimi_k25",)),
    "glm4_moe_lite": replace(
        DEEPSEEK_V3,
        experts=replace(
            SCORED_BY_SIGMOID,
            layers=SparseOr(all_but_the_first),
            keys={},
            one_meaning=WITHOUT_BIASES | {"first_k_dense_replace": (1,)},
        ),
    ),
}
