"""The kernels are as near to float64 as torch."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from swiftbatch.worker.kernels.native_decoder import NativeDecoder, native_attention
from swiftbatch.worker.kernels.native_library import Team, load_library
from swiftbatch.worker.kernels.transformers_weights import decoder_weights
from swiftbatch.worker.kv.cache_rows import CacheShape
from swiftbatch.worker.kv.full_cache import FullKVCache
from tests.worker.kernels.kernel_parts import (
    BF16,
    FLOAT32,
    LATENTS,
    SHAPES,
    VARIANTS,
    Shape,
    chain,
    native,
    needs_kernels,
    random_cache,
    random_partial_rows,
    random_weights,
    whole,
)
from tests.worker.kernels.reference import ReferenceDecoder, reference_attention

pytestmark = pytest.mark.long

SIZES: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.15,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama with biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "mistral with a window": MistralConfig(**SIZES, sliding_window=40),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2 with a window in a layer": Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=70, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**SIZES),
}
REFUSED = {
    "another activation": LlamaConfig(**SIZES, hidden_act="gelu"),
    "a window that its class does not look at": LlamaConfig(**SIZES, sliding_window=8),
    "types of layers that its class does not look at": MistralConfig(
        **SIZES, sliding_window=8, layer_types=["full_attention", "sliding_attention"]
    ),
    "angles that depend on the text": LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    ),
    "narrow heads": LlamaConfig(**SIZES | {"head_dim": 32}),
    "odd widths": LlamaConfig(**SIZES | {"intermediate_size": 100}),
    "another kind": GemmaConfig(**SIZES),
}
TOKENS = [11 * each % 120 for each in range(150)]


def build(config: PretrainedConfig, dtype: torch.dtype = FLOAT32) -> Any:
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:  # else ones and zeros
            parameter.add_(0.2 * torch.randn_like(parameter))
    for parameter in model.parameters():  # without rotary frequencies, which loaded models have in float32
        parameter.data = parameter.data.to(BF16).to(dtype)
    return model


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).pow(2).mean().sqrt())


def decoded(decoder: NativeDecoder | ReferenceDecoder, num_kv_heads: int, head_dim: int) -> Tensor:
    """Return all logits, block by block."""
    cache = FullKVCache(CacheShape(2, num_kv_heads, head_dim, decoder.sizes.dtype, torch.device("cpu")), len(TOKENS))
    logits = []
    for start in range(0, len(TOKENS), 64):
        block = TOKENS[start : start + 64]
        logits.append(whole(decoder.forward([chain(cache, block)]))[1])
        cache.advance(len(block))
    return torch.cat(logits)


@pytest.mark.sample(2)
@needs_kernels
@pytest.mark.parametrize("dtype", [BF16, FLOAT32], ids=["bf16", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_as_near_to_float64_as_transformers_own_forward(kind: str, dtype: torch.dtype) -> None:
    ids = torch.tensor([TOKENS])
    exact = build(KINDS[kind], torch.float64)(ids).logits[0]
    model = build(KINDS[kind], dtype)
    share = 1.1 if dtype == BF16 else 1.5  # our float32 sums are sequential, torch's in blocks of its choice
    bound = share * error(model(ids).logits[0], exact)
    weights = decoder_weights(model)
    assert weights is not None
    for variant in VARIANTS:
        own = dataclasses.replace(weights, layers=[*weights.layers])
        assert error(decoded(NativeDecoder(own, 1, variant), 2, 64), exact) <= bound
    assert error(decoded(ReferenceDecoder(weights), 2, 64), exact) <= bound


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_not_exactly_such_a_decoder_is_left_to_transformers(why: str) -> None:
    assert decoder_weights(build(REFUSED[why])) is None


def test_a_model_with_a_part_of_another_class_is_left_to_transformers() -> None:
    model = build(KINDS["llama"])
    model.model.layers[0].mlp.up_proj = torch.nn.Sequential(model.model.layers[0].mlp.up_proj)
    model.model.layers[0].mlp.up_proj.__class__ = type("Adapter", (torch.nn.Sequential,), {})
    assert decoder_weights(model) is None


def num_far(found: Tensor, reference: Tensor, shape: Shape) -> int:
    bound = 1e-5 if shape.dtype == FLOAT32 else 0.06
    errors = (found.float() - reference.float()).abs().amax(-1)
    return int((errors > bound * reference.float().abs().max()).sum())


def num_elsewhere(shape: Shape) -> int:
    """Count the rows that may choose another expert, with weights equal up to a bit."""
    return 3 if shape.experts is not None and shape.dtype == BF16 else 0


@pytest.mark.sample(2)
@needs_kernels
@pytest.mark.parametrize("shape", [*SHAPES, *LATENTS], ids=str)
def test_the_reference_says_the_same(shape: Shape) -> None:
    groups = [chain(random_cache(shape, length), list(range(1, 12))) for length in (0, 70, 300)]
    reference = whole(ReferenceDecoder(random_weights(shape)).forward(groups))
    for variant in VARIANTS:
        found = whole(native(shape, variant).forward(groups))
        for mine, its in zip(found, reference, strict=True):
            assert num_far(mine, its, shape) <= num_elsewhere(shape)


@pytest.mark.sample(3)
@needs_kernels
@pytest.mark.parametrize("shape", [*SHAPES, *LATENTS], ids=str)
def test_the_reference_says_the_same_behind_partial_caches(shape: Shape) -> None:
    numbers = random.Random(str(shape))
    groups = [random_partial_rows(numbers, shape, length, 5) for length in (0, 1, 63, 64, 65, 300, 2100)]
    reference = whole(ReferenceDecoder(random_weights(shape)).forward(groups))
    for variant in VARIANTS:
        found = whole(native(shape, variant).forward(groups))
        for mine, its in zip(found, reference, strict=True):
            assert num_far(mine, its, shape) <= num_elsewhere(shape)


@needs_kernels
@pytest.mark.parametrize("dtype", [BF16, FLOAT32], ids=["bf16", "float32"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_attention_alone_is_the_references(head_dim: int, dtype: torch.dtype) -> None:
    shape = Shape(head_dim=head_dim, num_kv_heads=2, group=3, dtype=dtype)
    groups = [chain(random_cache(shape, length), list(range(1, 9))) for length in (3, 300)]
    generator = torch.Generator().manual_seed(head_dim)  # the bound is tight for other numbers
    query, key, value = (torch.randn(16, heads, head_dim, generator=generator).to(dtype) for heads in (6, 2, 2))
    want = reference_attention(groups, 1, query, key, value, 0.1)
    bound = 1e-6 if dtype == FLOAT32 else 0.01
    for variant in VARIANTS:
        found = native_attention(Team(load_library(variant), 2), groups, 1, query, key, value, 0.1)
        assert (found.float() - want.float()).abs().max() <= bound * want.float().abs().max()
