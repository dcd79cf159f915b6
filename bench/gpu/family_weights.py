"""Families of models in published shapes, and random weights in these that lie on a device without any files.

Few layers are made, one of each kind; `deepened` repeats them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from swiftbatch.worker.kernels.cuda.stacked_weights import StackedWeights, handed_over, stacked_weights
from swiftbatch.worker.kernels.quantized_weights import CODE_BITS, Code, PackedExperts, PackedMatrix, Weight
from swiftbatch.worker.model.architectures.attention_layers import UP
from swiftbatch.worker.model.architectures.moe_layers import MoEConfig
from swiftbatch.worker.model.architectures.recurrent_layers import RecurrentConfig
from swiftbatch.worker.model.decoder_config import SINKS, DecoderConfig, read_decoder_config
from swiftbatch.worker.model.decoder_loading import decoder_of
from swiftbatch.worker.model.text_config import EMBEDDING, HEAD, text_view

Shapes = Iterator[tuple[str, tuple[int, ...]]]
DEVIATION = 0.02  # of random weights, as models are initialized with
SCALES: dict[Code, float] = {"e4m3": 2.0**-12, "e2m1": 2.0**-6}  # with which random codes spread about so
ALL_PRODUCTS = re.compile(r"_proj(_qkv|_z|_with_mqa)?\.weight$")  # that are stored in FP8
EXPERTS_ALONE = re.compile(r"\.experts\.(gate_up|down)_proj$")


@dataclass(frozen=True)
class PackedForm:
    """The form in which a family's weights are packed, and the tensors that have it."""

    code: Code
    group: int
    names: re.Pattern[str]


FP8, MXFP4 = PackedForm("e4m3", 128, ALL_PRODUCTS), PackedForm("e2m1", 32, EXPERTS_ALONE)


@dataclass(frozen=True)
class Family:
    """A model's config with one layer of each kind, and as many layers as are published."""

    name: str
    config: dict[str, Any]
    num_layers: int
    packed: PackedForm | None = None
    num_first: int = 0  # layers that stand once, in front of those that are repeated
    small: dict[str, Any] = field(default_factory=dict)  # of its config, for Triton's interpreter

    def cut(self) -> Family:
        """A small model of this family, of the layers that are made."""
        config = self.config | {"hidden_size": 128, "vocab_size": 300, "max_position_embeddings": 4096} | self.small
        return replace(self, config=config, num_layers=config["num_hidden_layers"])

    @property
    def text_config(self) -> dict[str, Any]:
        """The config as a model folder has it."""
        return text_view({"attention_bias": False, "tie_word_embeddings": False, "rope_scaling": None} | self.config)

    def weights(self, dtype: torch.dtype, device: torch.device) -> StackedWeights:
        """Random weights of the layers that are made."""
        dense = read_decoder_config(self.text_config)
        source = RandomWeights(self.packed, dtype, device)
        tensors = {name: source.tensor(name, shape) for name, shape in shapes_of(dense)}
        made = decoder_of(tensors, dense, dtype)
        del tensors
        return stacked_weights(made, device, handed_over(made))


HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
FAMILIES = (
    Family(
        "Qwen3.5 27B",
        {
            "head_dim": 256,
            "hidden_act": "silu",
            "hidden_size": 5120,
            "intermediate_size": 17_408,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 48,
            "linear_value_head_dim": 128,
            "max_position_embeddings": 262_144,
            "model_type": "qwen3_5_text",
            "num_attention_heads": 24,
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
            "vocab_size": 248_320,
        },
        num_layers=64,
        packed=FP8,
        small=HEADS
        | {
            "head_dim": 64,
            "intermediate_size": 128,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 16,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_value_head_dim": 16,
            "num_hidden_layers": 2,
        },
    ),
    Family(
        "Qwen3 30B A3B",
        {
            "decoder_sparse_step": 1,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "max_position_embeddings": 40_960,
            "mlp_only_layers": [],
            "model_type": "qwen3_moe",
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 1,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "sliding_window": None,
            "use_sliding_window": False,
            "vocab_size": 151_936,
        },
        num_layers=48,
        packed=FP8,
        small=HEADS | {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 64},
    ),
    Family(
        "gpt-oss 20B",
        {
            "attention_bias": True,
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "layer_types": ["sliding_attention", "full_attention"],
            "max_position_embeddings": 131_072,
            "model_type": "gpt_oss",
            "num_attention_heads": 64,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 2,
            "num_key_value_heads": 8,
            "num_local_experts": 32,
            "rms_norm_eps": 1e-5,
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
                "truncate": False,
            },
            "rope_theta": 150_000,
            "sliding_window": 128,
            "vocab_size": 201_088,
        },
        num_layers=24,
        packed=MXFP4,
        small=HEADS | {"intermediate_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    Family(
        "GLM 4.7 Flash",
        {
            "first_k_dense_replace": 1,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 10_240,
            "kv_lora_rank": 512,
            "max_position_embeddings": 202_752,
            "model_type": "glm4_moe_lite",
            "moe_intermediate_size": 1536,
            "n_group": 1,
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_attention_heads": 20,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 2,
            "num_key_value_heads": 20,
            "partial_rotary_factor": 1.0,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "routed_scaling_factor": 1.8,
            "topk_group": 1,
            "v_head_dim": 256,
            "vocab_size": 154_880,
        },
        num_layers=47,
        packed=FP8,
        num_first=1,
        small={
            "intermediate_size": 128,
            "kv_lora_rank": 128,
            "moe_intermediate_size": 128,
            "n_routed_experts": 4,
            "num_attention_heads": 4,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 4,
            "q_lora_rank": 128,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
        },
    ),
    Family(
        "Gemma 3 27B",
        {
            "head_dim": 128,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 5376,
            "intermediate_size": 21_504,
            "max_position_embeddings": 131_072,
            "model_type": "gemma3_text",
            "num_attention_heads": 32,
            "num_hidden_layers": 6,
            "num_key_value_heads": 16,
            "query_pre_attn_scalar": 168,
            "rms_norm_eps": 1e-6,
            "rope_local_base_freq": 10_000,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "rope_theta": 1_000_000,
            "sliding_window": 1024,
            "sliding_window_pattern": 6,
            "tie_word_embeddings": True,
            "vocab_size": 262_208,
        },
        num_layers=62,
        small=HEADS | {"intermediate_size": 128, "num_hidden_layers": 2, "sliding_window_pattern": 2},
    ),
)


@dataclass
class RandomWeights:
    """Makes tensors of random numbers, all of them from one seed."""

    packed: PackedForm | None
    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(0)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Weight:
        """The tensor of a name, in the form that the family has it in."""
        if self.packed is not None and self.packed.names.search(name):
            return self._packed(self.packed, shape)
        numbers = torch.empty(shape, dtype=self.dtype, device=self.device)
        return numbers.fill_(1.0) if name.endswith("norm.weight") else self._normal(numbers)

    def _normal(self, numbers: Tensor) -> Tensor:
        return numbers.normal_(0.0, DEVIATION, generator=self.generator)

    def _packed(self, form: PackedForm, shape: tuple[int, ...]) -> PackedMatrix:
        """A matrix, or those of all experts where a dimension stands in front."""
        columns, depth = math.prod(shape[:-1]), shape[-1]
        width, num_groups = depth * CODE_BITS[form.code] // 8, depth // min(form.group, depth)
        made: dict[str, Any] = {"generator": self.generator, "device": self.device}
        codes = torch.randint(0, 256, (columns, width), **made, dtype=torch.uint8)
        if form.code == "e4m3":
            codes[(codes & 127) == 127] = 0  # which are no numbers
        scales = SCALES[form.code] * torch.rand(columns, num_groups, **made)
        if len(shape) == 2:
            return PackedMatrix(form.code, codes, scales, self.dtype)
        return PackedExperts(form.code, codes, scales, self.dtype, num_experts=shape[0])


def shapes_of(dense: DecoderConfig) -> Shapes:
    """Yield the names and shapes of a model's tensors; experts that lie in one tensor with their columns as rows."""
    yield EMBEDDING, (dense.vocab, dense.hidden)
    yield f"{dense.form.final_norm}.weight", (dense.hidden,)
    if not dense.is_tied:
        yield HEAD, (dense.vocab, dense.hidden)
    for number in range(dense.num_layers):
        for name, shape in _of_layer(dense, number):
            yield f"model.layers.{number}.{name}", shape


def _of_layer(dense: DecoderConfig, number: int) -> Shapes:
    for part in dense.form.norms.values():
        yield f"{part}.weight", (dense.hidden,)
    shapes = _linear_shapes(dense, number)
    for role, name in dense.linears(number).items():
        yield f"{name}.weight", shapes[role]
        if f"{name}.bias" in dense.parts:
            yield f"{name}.bias", shapes[role][:1]
    if dense.attends(number):
        latent = dense.latent and {"query_norm": dense.latent.sizes.query_rank, "key_norm": dense.latent.sizes.rank}
        for role, part in dense.qk_norms.items():
            yield f"{part}.weight", (latent[role] if latent else dense.head_dim,)
        if dense.form.has_sinks:
            yield SINKS, (dense.num_heads,)
    if dense.mixer is not None and number in dense.mixer.layers:
        yield from _of_mixer(dense.mixer, dense.hidden)
    if dense.experts is not None and number in dense.experts.layers:
        yield from _of_experts(dense.experts)


def _linear_shapes(dense: DecoderConfig, number: int) -> dict[str, tuple[int, int]]:
    """Columns and depth of a layer's products, by their roles."""
    hidden, widths = dense.hidden, dense.widths(number)
    shapes = {role: (width, hidden) for role, width in widths.items()}
    shapes |= {"output": (hidden, widths["query"]), "down": (hidden, widths["up"])}
    if dense.form.gates_heads:
        shapes["query"] = (2 * widths["query"], hidden)
    if dense.latent is None:
        return shapes
    sizes, num_heads = dense.latent.sizes, dense.num_heads
    return shapes | {
        "query_down": (sizes.query_rank, hidden),
        "query": (num_heads * sizes.query_dim, sizes.query_rank or hidden),
        "key": (sizes.entry_dim, hidden),
        UP: (num_heads * (sizes.nope_dim + sizes.value_dim), sizes.rank),
        "output": (hidden, num_heads * sizes.value_dim),
    }


def _of_mixer(mixer: RecurrentConfig, hidden: int) -> Shapes:
    sizes, columns = mixer.sizes, mixer.sizes.columns()
    numbers = {"taps": (sizes.num_channels, 1, sizes.conv_width), "norm": (sizes.norm_width,)}
    for role, name in mixer.numbers.items():
        yield name, numbers.get(role, (mixer.shape.num_heads,))
    for name, roles in mixer.names.linears.items():
        is_output = roles == ("output",)
        shape = (hidden, sizes.width) if is_output else (sum(columns[role] for role in roles), hidden)
        yield f"{mixer.names.part}.{name}.weight", shape


def _of_experts(experts: MoEConfig) -> Shapes:
    names, number, hidden, width = experts.names, experts.routing.num_experts, experts.hidden, experts.width
    yield names.router, (number, hidden)
    for name in (names.router_bias, names.choice_bias):
        if name is not None:
            yield name, (number,)
    if names.each is not None:
        shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
        for role, name in names.each.items():
            yield from ((name.format(each), shapes[role]) for each in range(number))
    elif names.fused is not None:
        for name, shape in ((names.fused.gate_up, (2 * width, hidden)), (names.fused.down, (hidden, width))):
            yield name, (number, *shape)
            yield f"{name}{names.fused.bias_suffix}", (number, shape[0])
