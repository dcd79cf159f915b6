"""DeepSeek V4: compressed attention, streams of a row's state, and experts by a table of tokens. Without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from swiftbatch.worker.kernels.kernel_sizes import CacheLayer, CompressedSizes, IndexerSizes, Pools
from swiftbatch.worker.kernels.layer_specs import NormForm, Score
from swiftbatch.worker.model.architectures.attention_layers import (
    INDEX_KEYS,
    WINDOWED,
    MLAConfig,
    MLASpec,
    Windows,
    window_size,
)
from swiftbatch.worker.model.architectures.moe_layers import (
    ROLES,
    SHARED,
    MoESpec,
    MoETensorNames,
    experts_in_all_layers,
)
from swiftbatch.worker.model.architectures.spec import ArchitectureSpec, StreamSpec, WindowAngles
from swiftbatch.worker.model.config_values import BASE, COUNT, SIZE, Config, KeyRule, list_of_layers

SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
SERIES = {SPARSE: 2, HEAVY: 1}  # of pooled keys, in layers that have some
TYPES = {0: WINDOWED, 4: SPARSE, 128: HEAVY}  # by their published ratio
RATES = {SPARSE: 4, HEAVY: 128}
HASHED, CHOOSING = "hash_moe", "moe"
ROPE_DIM = 64
POOLED, OF_INDEXER = "self_attn.compressor.", "self_attn.compressor.indexer."
INDEX_NAMES = {"index_query": f"{OF_INDEXER}q_b_proj.weight", "index_weight": f"{OF_INDEXER}scorer.weights_proj.weight"}
POOL_NAMES = {"key": "kv_proj.weight", "gate": "gate_proj.weight", "bias": "position_bias", "norm": "kv_norm.weight"}
PUBLISHED = tuple(  # parts of published names -> those of its class in transformers
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^embed\.", "embed_tokens."),
        (r"^head\.", "lm_head."),
        (r"^hc_head_", "hc_head.hc_"),
        (r"\.attn_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
        (r"\.attn\.", ".self_attn."),
        (r"\.ffn\.", ".mlp."),
        (r"\.indexer\.compressor\.", ".compressor.indexer."),
        (r"\.self_attn\.indexer\.weights_proj\.", ".self_attn.compressor.indexer.scorer.weights_proj."),
        (r"\.self_attn\.indexer\.wq_b\.", ".self_attn.compressor.indexer.q_b_proj."),
        (r"(\.self_attn\..*)\bnorm\.", r"\1kv_norm."),
        (r"\.attn_sink$", ".sinks"),
        (r"\.ape$", ".position_bias"),
        (r"\.wq_(a|b)\.", r".q_\1_proj."),
        (r"\.wo_(a|b)\.", r".o_\1_proj."),
        (r"\.wkv\.", ".kv_proj."),
        (r"\.wgate\.", ".gate_proj."),
        (r"\.q_norm\.", ".q_a_norm."),
        (r"\.mlp\.gate\.bias$", ".mlp.gate.e_score_correction_bias"),
        (r"\.shared_experts\.w1\.", ".shared_experts.gate_proj."),
        (r"\.shared_experts\.w2\.", ".shared_experts.down_proj."),
        (r"\.shared_experts\.w3\.", ".shared_experts.up_proj."),
    )
)


def name_in_class(name: str) -> str:
    """Return a published name as the class in transformers has it."""
    name = name.removeprefix("model.")
    for pattern, replacement in PUBLISHED:
        name = pattern.sub(replacement, name)
    return name if name.startswith("lm_head.") else f"model.{name}"


def as_its_class_reads(config: Config) -> dict[str, Any]:
    """Return the config with the keys of its class in transformers, but rotary parameters as they are published."""
    view, num_layers = dict(config), config.get("num_hidden_layers")
    ratios, num_hashed = view.pop("compress_ratios", None), view.pop("num_hash_layers", 3)
    if not isinstance(num_layers, int):
        return view
    if view.get("layer_types") is None and isinstance(ratios, list):  # ratios of MTP layers follow
        view["layer_types"] = [
            TYPES.get(each, str(each)) if type(each) is int else each for each in ratios[:num_layers]
        ]
    if view.get("mlp_layer_types") is None and COUNT.holds(num_hashed):
        view["mlp_layer_types"] = [HASHED if number < num_hashed else CHOOSING for number in range(num_layers)]
    rates = {SPARSE: view.pop("compress_rate_csa", None), HEAVY: view.pop("compress_rate_hca", None)}
    if view.get("compress_rates") is None:
        view["compress_rates"] = RATES
    if isinstance(view["compress_rates"], dict):
        view["compress_rates"] = view["compress_rates"] | {
            kind: rate for kind, rate in rates.items() if rate is not None
        }
    head_dim, share = view.get("head_dim"), view.pop("partial_rotary_factor", None)
    if "qk_rope_head_dim" not in view and isinstance(head_dim, int):
        view["qk_rope_head_dim"] = ROPE_DIM * head_dim // 512 if share is None else int(head_dim * share)
    return _with_published_angles(view)


def _with_published_angles(view: dict[str, Any]) -> dict[str, Any]:
    """Return the config with `rope_scaling` of layers with pooled keys, whose angles are not scaled by themselves."""
    said = view.pop("rope_parameters", None) or {}
    if isinstance(said, dict) and isinstance(said.get("main"), dict) and isinstance(said.get("compress"), dict):
        main, compress = said["main"], said["compress"]
        view |= {"rope_theta": main.get("rope_theta"), "compress_rope_theta": compress.get("rope_theta")}
        if main.get("rope_type", "default") != "default":
            return view | {"rope_parameters": said}  # its windows have other angles, which are not known
        said = compress
    if isinstance(said, dict) and said and view.get("rope_scaling") is None:
        view["rope_scaling"] = said
    if isinstance(scaling := view.get("rope_scaling"), dict):
        is_yarn = "yarn" in (scaling.get("rope_type"), scaling.get("type"))
        read = {key: each for key, each in scaling.items() if key not in ("rope_theta", "partial_rotary_factor")}
        view["rope_scaling"] = ({"attention_factor": 1.0} if is_yarn else {}) | read
    return view


def windows_alone(config: Config) -> Windows:
    """Return the windows of layers without pooled keys; the others have one, too, beside these."""
    types = list_of_layers(config, "layer_types", TYPES.values())
    return tuple(window_size(config) if each == WINDOWED else None for each in types)


def hashed_layers(config: Config) -> frozenset[int]:
    types = list_of_layers(config, "mlp_layer_types", (HASHED, CHOOSING))
    return frozenset(number for number, each in enumerate(types) if each == HASHED)


@dataclass(frozen=True)
class CompressedConfig(MLAConfig):
    """The compressed attention of a model's layers."""

    window: int = 1
    pools: Mapping[int, Pools] = field(default_factory=dict)  # by layer, of those with pooled keys

    @property
    def compressed(self) -> CompressedSizes:
        assert isinstance(self.sizes, CompressedSizes)
        return self.sizes

    def kept(self, number: int) -> tuple[CacheLayer, ...]:
        return self.compressed.kept(self.window, self.pools.get(number))

    @property
    def linears(self) -> dict[str, str]:
        names = {"query_down": "q_a", "query": "q_b", "key": "kv", "output_down": "o_a", "output": "o_b"}
        return {role: f"self_attn.{name}_proj" for role, name in names.items()}

    @property
    def norms(self) -> dict[str, str]:
        return {"query_norm": "self_attn.q_a_norm", "key_norm": "self_attn.kv_norm"}

    def order(self, width: int) -> list[int]:
        """Return the stored index of each dimension of a head, whose last ones are rotated, in the kernels' order."""
        first = width - self.sizes.rope_dim
        return [*range(first), *(first + each for each in self.turned_order)]

    def prefixes(self, number: int) -> dict[str, str]:
        """Return the prefixes of the names of a layer's pools."""
        if (pools := self.pools.get(number)) is None:
            return {}
        return {"pool": POOLED} | ({"index_pool": OF_INDEXER} if pools.series == 2 else {})

    def index_tensors(self, number: int) -> list[str]:
        prefixes = self.prefixes(number)
        names = [prefix + name for prefix in prefixes.values() for name in POOL_NAMES.values()]
        return names + ([*INDEX_NAMES.values()] if "index_pool" in prefixes else [])

    def floats(self, number: int) -> list[str]:
        return [prefix + POOL_NAMES["bias"] for prefix in self.prefixes(number).values()]


@dataclass(frozen=True)
class CompressedSpec(MLASpec):
    """The config keys of compressed attention."""

    @property
    def types(self) -> frozenset[str]:
        return frozenset(SERIES)

    @property
    def needed(self) -> tuple[str, ...]:
        return ("head_dim", "q_lora_rank", "o_groups", "o_lora_rank")

    def rules(self) -> dict[Any, KeyRule | None]:
        keys = ("q_lora_rank", "o_groups", "o_lora_rank", "qk_rope_head_dim", *INDEX_KEYS)
        rates = KeyRule("an object of positive integers", _are_rates)
        found: dict[Any, KeyRule | None] = dict.fromkeys(keys, SIZE)
        return found | {"compress_rates": rates, "compress_rope_theta": BASE}

    def read(self, config: Config) -> CompressedConfig:
        if config["num_key_value_heads"] != 1:
            raise ValueError(f"its num_key_value_heads is {config['num_key_value_heads']!r:.80}")
        head_dim, rope_dim = config["head_dim"], config["qk_rope_head_dim"]
        sizes = CompressedSizes(
            rank=head_dim,
            query_rank=config["q_lora_rank"],
            nope_dim=head_dim - rope_dim,
            rope_dim=rope_dim,
            value_dim=head_dim,
            indexer=IndexerSizes(*(SIZE.of(config, key) for key in INDEX_KEYS)),
            output_groups=config["o_groups"],
            output_rank=config["o_lora_rank"],
        )
        types = list_of_layers(config, "layer_types", TYPES.values())
        rates = config["compress_rates"]
        pools = {number: Pools(rates[each], SERIES[each]) for number, each in enumerate(types) if each in SERIES}
        return CompressedConfig(sizes, head_dim**-0.5, True, window=window_size(config), pools=pools)


def _are_rates(value: Any) -> bool:
    return isinstance(value, dict) and set(value) == set(RATES) and all(map(SIZE.holds, value.values()))


DEEPSEEK_V4 = ArchitectureSpec(
    norm_form=NormForm.ONCE,
    latent=CompressedSpec(),
    streams=StreamSpec("hc_mult", "hc_sinkhorn_iters", "hc_eps"),
    windows=windows_alone,
    window_angles=WindowAngles(160000.0, 1e4, "rope_theta", "compress_rope_theta"),
    sinks="self_attn.sinks",
    intermediate_key="moe_intermediate_size",
    experts=MoESpec(
        Score.ROOT_SOFTPLUS,
        experts_in_all_layers,
        names=MoETensorNames(
            each={role: f"mlp.experts.{{}}.w{number}.weight" for role, number in zip(ROLES, (1, 3, 2), strict=True)},
            choice_bias="mlp.gate.e_score_correction_bias",
            choices="mlp.gate.tid2eid",
            shared=SHARED,
        ),
        tables=hashed_layers,
        least_sum=1e-20,
        scale="routed_scaling_factor",
        num_shared="n_shared_experts",
        gate_limit="swiglu_limit",
        keys=dict.fromkeys(("router_jitter_noise",)),
        one_meaning={
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "n_shared_experts": (1,),
            "norm_topk_prob": (True,),
            "scoring_func": ("sqrtsoftplus",),
            "topk_method": ("noaux_tc",),
        },
    ),
    name_in_class=name_in_class,
    defaults={  # a published config leaves these to its class
        "hidden_act": "silu",
        "n_shared_experts": 1,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
    },
    view=as_its_class_reads,
    aliases=("deepseek_ref",),
    on_cpu_alone="compressed keys, and hyper-connections",
)
