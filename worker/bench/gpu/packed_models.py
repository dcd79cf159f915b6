"""Models whose weights are published in 8 or 4 bits: their sizes, which follow from their configs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from swiftbatch.worker.caches.memory.model_sizes import ExpertSizes, ModelSizes
from swiftbatch.worker.caches.memory.packed_sizes import PackedPart

DENSE = {
    "Llama 3.1 8B": ModelSizes(8_030_261_248, 131_072, 32, 8, 128, 4096, 14336, 128_256, 2),
    "Qwen3 32B": ModelSizes(32_762_123_264, 262_144, 64, 8, 128, 5120, 25600, 151_936, 2),
    "Llama 3.1 70B": ModelSizes(70_553_706_496, 327_680, 64, 8, 128, 8192, 28672, 128_256, 2),
}
MXFP4, FP8 = "MXFP4 experts", "FP8, blocks of 128"
CHOSEN = {  # with all routers, their biases and sinks
    "gpt-oss-20b": ExpertSizes(32, 4, 2880, 24 * (32 * 2881 + 64)),
    "gpt-oss-120b": ExpertSizes(128, 4, 2880, 36 * (128 * 2881 + 64)),
    "Qwen3 30B A3B": ExpertSizes(128, 8, 768, 48 * 128 * 2048),
}
EXPERTS = {  # with what of their weights is packed: all experts, and where FP8 is published all products
    "gpt-oss-20b": (ModelSizes(20_914_757_184, 49_152, 64, 8, 64, 2880, 2880, 201_088, 2), MXFP4, 19_110_297_600),
    "gpt-oss-120b": (ModelSizes(116_829_156_672, 73_728, 64, 8, 64, 2880, 2880, 201_088, 2), MXFP4, 114_661_785_600),
    "Qwen3 30B A3B": (ModelSizes(30_532_122_624, 98_304, 32, 4, 128, 2048, 6144, 151_936, 2), FP8, 29_896_998_912),
}


def packed_models() -> Iterator[tuple[str, str, ModelSizes]]:
    """Yield each model in each form: its products packed, embedding, head, norms and biases in bfloat16."""
    for model, sizes in DENSE.items():
        number = num_in_products(sizes)
        yield model, "bfloat16", sizes
        yield model, FP8, replace(sizes, packed=(PackedPart(number, 8, 128),))
        yield model, "int4, groups of 128", replace(sizes, packed=(PackedPart(number, 4, 128, has_offsets=True),))
    for model, (sizes, form, number) in EXPERTS.items():
        part = PackedPart(number, 4, 32) if form == MXFP4 else PackedPart(number, 8, 128)
        yield model, form, replace(sizes, packed=(part,), experts=CHOSEN[model])


def num_in_products(sizes: ModelSizes) -> int:
    """Count the weights in the products of a dense model's layers."""
    num_layers = sizes.bytes_per_position // (2 * sizes.num_kv_heads * sizes.head_dim * sizes.item_size)
    heads = 2 * (sizes.num_heads + sizes.num_kv_heads) * sizes.head_dim  # rows of q, k and v, columns of the output
    return num_layers * sizes.hidden * (heads + 3 * sizes.intermediate)
