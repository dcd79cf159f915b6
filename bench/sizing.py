"""Computes docs/gpu.md's tables of jobs that fit a GPU, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from bench.options import JSONOptions as Options
from bench.tables import Record
from swiftbatch.worker.inspection import CONTEXT_BYTES, GPU_BYTES, SLOT_LENGTHS
from swiftbatch.worker.kernels.kernel_sizes import MLASizes
from swiftbatch.worker.kernels.rank_shares import RANK_CHOICES
from swiftbatch.worker.kv.gpu_memory_plan import KEPT, GPUMemory, most_together, one_slot
from swiftbatch.worker.kv.kv_capacity import GB, NUM_UNWRITTEN, held_in_windows
from swiftbatch.worker.kv.model_sizes import ExpertSizes, ModelSizes, PackedPart

DENSE = {  # published in 8 or 4 bits; sizes follow from the configs
    "Llama 3.1 8B": ModelSizes(8_030_261_248, 131_072, 32, 8, 128, 4096, 14336, 128_256, 2),
    "Qwen3 32B": ModelSizes(32_762_123_264, 262_144, 64, 8, 128, 5120, 25600, 151_936, 2),
    "Llama 3.1 70B": ModelSizes(70_553_706_496, 327_680, 64, 8, 128, 8192, 28672, 128_256, 2),
}
MXFP4, FP8 = "MXFP4 experts", "FP8, blocks of 128"
CHOSEN = {  # routers, biases and sinks included
    "gpt-oss-20b": ExpertSizes(32, 4, 2880, 24 * (32 * 2881 + 64)),
    "gpt-oss-120b": ExpertSizes(128, 4, 2880, 36 * (128 * 2881 + 64)),
    "Qwen3 30B A3B": ExpertSizes(128, 8, 768, 48 * 128 * 2048),
    "GLM 4.7 Flash": ExpertSizes(64, 4, 1536, 46 * 64 * 2049),
}
LATENT = MLASizes(rank=512, query_rank=768, nope_dim=192, rope_dim=64, value_dim=256)  # GLM 4.7 Flash
EXPERTS = {  # packed are all experts, and with published FP8 all products
    "gpt-oss-20b": (ModelSizes(20_914_757_184, 49_152, 64, 8, 64, 2880, 2880, 201_088, 2), MXFP4, 19_110_297_600),
    "gpt-oss-120b": (ModelSizes(116_829_156_672, 73_728, 64, 8, 64, 2880, 2880, 201_088, 2), MXFP4, 114_661_785_600),
    "Qwen3 30B A3B": (ModelSizes(30_532_122_624, 98_304, 32, 4, 128, 2048, 6144, 151_936, 2), FP8, 29_896_998_912),
    "GLM 4.7 Flash": (
        ModelSizes(29_943_393_920, 54_144, 20, 1, 576, 2048, 10240, 154_880, 2, latent=LATENT),
        FP8,
        29_087_105_024,
    ),
}

WINDOWED = {  # some layers have a window
    "Gemma 3 27B": ModelSizes(
        *(27_009_346_304, 507_904, 32, 16, 128, 5376, 21504, 262_208, 2),
        windows=((1024,) * 5 + (None,)) * 10 + (1024,) * 2,
    ),
    "gpt-oss-20b": replace(EXPERTS["gpt-oss-20b"][0], windows=(128, None) * 12),
    "gpt-oss-120b": replace(EXPERTS["gpt-oss-120b"][0], windows=(128, None) * 18),
}
MODELS = {
    "Llama 3.1 8B": DENSE["Llama 3.1 8B"],
    "Qwen2.5 32B": ModelSizes(32_763_876_352, 262_144, 40, 8, 128, 5120, 27648, 152_064, 2),
}
H100 = GPUMemory(GPU_BYTES - CONTEXT_BYTES)
QWEN3_235B = ModelSizes(235_093_634_560, 192_512, 64, 4, 128, 4096, 12288, 151_936, 2)
LARGE = {  # with the parameters that every GPU has: embedding, norms and routers
    "Llama 3.1 70B, bfloat16": replace(DENSE["Llama 3.1 70B"], num_on_every_gpu=128_256 * 8192 + 161 * 8192),
    "Qwen3 235B A22B, FP8": replace(
        QWEN3_235B,
        packed=(PackedPart(233_798_893_568, 8, 128),),
        experts=ExpertSizes(128, 8, 1536, 94 * 128 * 4096),
        num_on_every_gpu=151_936 * 4096 + 94 * (128 * 4096 + 8448) + 4096,
    ),
    "gpt-oss-120b, MXFP4 experts": replace(
        EXPERTS["gpt-oss-120b"][0],
        packed=(PackedPart(EXPERTS["gpt-oss-120b"][2], 4, 32),),
        experts=CHOSEN["gpt-oss-120b"],
        num_on_every_gpu=201_088 * 2880 + 73 * 2880 + 36 * (128 * 2881 + 64),
    ),
}


def packed_table() -> Iterator[Record]:
    """Yield forms of weights: GB, and the jobs that fit one H100, also with 8-bit keys and values."""
    for model, form, sizes in packed_models():
        in_fp8 = replace(sizes, kv_dtype="fp8") if sizes.latent is None else None
        jobs = _most_jobs(sizes) | _most_jobs(in_fp8, ", keys in fp8")
        yield {"weights of": model, "form": form, "GB": f"{sizes.weight_bytes / GB:.1f}"} | jobs


def window_table() -> Iterator[Record]:
    """Yield models with windows: GB per job and the jobs that fit one H100, with and without forgetting."""
    for (model, plain), length in product(WINDOWED.items(), SLOT_LENGTHS):
        if model in EXPERTS:
            plain = replace(plain, packed=(PackedPart(EXPERTS[model][2], 4, 32),), experts=CHOSEN[model])
        forgetting = replace(plain, held=held_in_windows(plain.windows, NUM_UNWRITTEN))
        record: Record = {"model with windows": model, "positions": f"{length:,}"}
        for name, sizes in (("a job", forgetting), ("all held", plain)):
            record[name] = f"{one_slot(sizes, H100, length).needs[KEPT].per_slot / GB:.2f}"
        for name, sizes in (("jobs", forgetting), ("jobs, all held", plain)):
            record[name] = _most(sizes, length)
        yield record


def rank_table() -> Iterator[Record]:
    """Yield models on several H100s: GB of weights on each, and the jobs that fit."""
    for (model, whole), num_ranks in product(LARGE.items(), RANK_CHOICES):
        sizes = whole.of_a_rank(num_ranks)
        place = {"model on several GPUs": model, "GPUs": str(num_ranks)}
        yield place | {"GB on each": f"{sizes.weight_bytes / GB:.1f}"} | _most_jobs(sizes)


def _most_jobs(sizes: ModelSizes | None, words: str = "") -> Record:
    return {f"jobs of {length:,}{words}": "-" if sizes is None else _most(sizes, length) for length in SLOT_LENGTHS}


def _most(sizes: ModelSizes, length: int) -> str:
    return str(most_together(sizes, H100, length) or "none")


def packed_models() -> Iterator[tuple[str, str, ModelSizes]]:
    """Yield each model with packed products; the rest stays bfloat16."""
    for model, sizes in DENSE.items():
        number = num_in_products(sizes)
        yield model, "bfloat16", sizes
        yield model, FP8, replace(sizes, packed=(PackedPart(number, 8, 128),))
        yield model, "int4, groups of 128", replace(sizes, packed=(PackedPart(number, 4, 128, has_offsets=True),))
    for model, (sizes, form, number) in EXPERTS.items():
        part = PackedPart(number, 4, 32) if form == MXFP4 else PackedPart(number, 8, 128)
        yield model, form, replace(sizes, packed=(part,), experts=CHOSEN[model])


def num_in_products(sizes: ModelSizes) -> int:
    num_layers = sizes.bytes_per_position // (2 * sizes.num_kv_heads * sizes.head_dim * sizes.item_size)
    heads = 2 * (sizes.num_heads + sizes.num_kv_heads) * sizes.head_dim  # rows of q, k and v, columns of the output
    return num_layers * sizes.hidden * (heads + 3 * sizes.intermediate)


def run(options: Options) -> Iterator[Record]:
    """Compute the tables of docs/gpu.md of the memory that models need; --markdown prints them as there.

    \b
    Example:
      python -m bench sizing --markdown
    """
    yield from (*packed_table(), *window_table(), *rank_table())
