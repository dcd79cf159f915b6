"""Models of the packed table have the sizes of their published configs."""

from __future__ import annotations

import pytest

from bench.sizing import DENSE, EXPERTS, num_in_products


def products(hidden: int, heads: int, kv_heads: int, intermediate: int) -> int:
    """Count by hand, for heads of 128."""
    return hidden * heads * 128 + 2 * hidden * kv_heads * 128 + heads * 128 * hidden + 3 * hidden * intermediate


@pytest.mark.parametrize(
    ("model", "num_layers", "hidden", "heads", "intermediate", "vocab", "norms"),
    [
        ("Llama 3.1 8B", 32, 4096, 32, 14336, 128_256, 2 * 4096),
        ("Qwen3 32B", 64, 5120, 64, 25600, 151_936, 2 * 5120 + 2 * 128),
        ("Llama 3.1 70B", 80, 8192, 64, 28672, 128_256, 2 * 8192),
    ],
)
def test_dense_models(
    model: str, num_layers: int, hidden: int, heads: int, intermediate: int, vocab: int, norms: int
) -> None:
    sizes, of_layers = DENSE[model], num_layers * products(hidden, heads, 8, intermediate)
    assert num_in_products(sizes) == of_layers
    assert sizes.num_parameters == of_layers + num_layers * norms + hidden + 2 * vocab * hidden
    assert sizes.bytes_per_position == 2 * num_layers * 8 * 128 * 2


@pytest.mark.parametrize(("model", "num_layers", "num_experts"), [("gpt-oss-20b", 24, 32), ("gpt-oss-120b", 36, 128)])
def test_models_of_experts(model: str, num_layers: int, num_experts: int) -> None:
    sizes, _, in_experts = EXPERTS[model]
    attention = 2 * 4096 * 2880 + 2 * 512 * 2880 + 4096 + 2 * 512 + 2880 + 64
    experts = num_experts * (3 * 2880 * 2880 + 3 * 2880)
    layer = attention + experts + num_experts * 2880 + num_experts + 2 * 2880
    assert in_experts == num_layers * num_experts * 3 * 2880 * 2880
    assert sizes.num_parameters == num_layers * layer + 2880 + 2 * 201_088 * 2880
    assert sizes.bytes_per_position == 2 * num_layers * 8 * 64 * 2


def test_experts_of_qwen3_whose_products_are_all_packed() -> None:
    """Counts a router and four norms per layer."""
    sizes, _, in_products = EXPERTS["Qwen3 30B A3B"]
    layer = products(2048, 32, 4, 0) + 128 * 3 * 2048 * 768
    assert in_products == 48 * layer
    assert sizes.num_parameters == 48 * (layer + 128 * 2048 + 2 * 2048 + 2 * 128) + 2048 + 2 * 151_936 * 2048
    assert sizes.bytes_per_position == 2 * 48 * 4 * 128 * 2
