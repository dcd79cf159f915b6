"""The constants of packed and expert kernels for published models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from swiftbatch.worker.kernels.cuda import gemm, moe_gemm, moe_router
from swiftbatch.worker.kernels.cuda.repacked_weights import RepackedMatrix, repacked
from swiftbatch.worker.kernels.cuda.stacked_weights import StackedExperts
from swiftbatch.worker.kernels.kernel_sizes import FEW_ROWS, NUM_ROWS
from swiftbatch.worker.kernels.layer_specs import Activation, Routing, Score
from swiftbatch.worker.kernels.quantized_weights import CODE_BITS, TABLES, Code, PackedMatrix, Weight, linear_from

HIDDEN = 4096  # of Llama 3.1 8B
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
Made = tuple[Any, dict[str, Any]]  # a kernel, its constants and options


def without(constants: dict[str, int], has: str, *pointers: str) -> dict[str, Any]:
    return constants | {has: False} | dict.fromkeys(pointers)


WIDE = 1 + 2.0**-12  # a scale that bfloat16 rounds
MANY_COLUMNS = 28672  # of Llama 3.1 8B's gate and up projections
ROWS_OF_PACKED = (FEW_ROWS, NUM_ROWS, 128)


def packed_forms() -> dict[str, PackedMatrix]:
    """Return every code; scales in bfloat16 and float32; groups of 16, 32, 128 and a whole depth; few columns."""
    found = {
        "packed uint4": packed_zeros("uint4", HIDDEN, 128, offset=-8.0),
        "packed uint4 without offsets": packed_zeros("uint4", HIDDEN, 128),
        "packed uint4 with offsets": packed_zeros("uint4", HIDDEN, 128, scale=WIDE, offset=1.0),
        "packed e4m3": packed_zeros("e4m3", HIDDEN, 128, scale=WIDE),
        "packed e4m3 of another depth": packed_zeros("e4m3", HIDDEN + 32, 32, scale=WIDE),
        "packed e2m1": packed_zeros("e2m1", HIDDEN, 32),
        "packed e2m1 in blocks of 16": packed_zeros("e2m1", HIDDEN, 16, scale=WIDE),
        "packed iq4_nl": packed_zeros("iq4_nl", HIDDEN, 32, scale=WIDE),
        "packed int8": packed_zeros("int8", HIDDEN, HIDDEN, scale=WIDE),
        "packed uint8": packed_zeros("uint8", HIDDEN, 32, scale=WIDE, offset=1.0),
        "packed uint4 of few columns": packed_zeros("uint4", HIDDEN, 128, offset=-8.0, num_columns=HIDDEN),
        "packed e4m3 of few columns": packed_zeros("e4m3", HIDDEN, 128, scale=WIDE, num_columns=HIDDEN),
    }
    assert {matrix.code for matrix in found.values()} == set(TABLES)
    return found


def linear_kernels(dtype: str) -> dict[str, Made]:
    weight = plain_zeros(dtype)
    return {
        "linear": product(weight),
        f"linear of {FEW_ROWS} rows": product(weight, num_tile_rows=FEW_ROWS),
        "linear of few columns": product(plain_zeros(dtype, HIDDEN)),
        "linear in parts": product(plain_zeros(dtype, HIDDEN), num_parts=8),
        "linear in parts of 2 GPUs": product(plain_zeros(dtype, HIDDEN), num_parts=4, num_ranks=2),
        "linear with bias": product(weight, has_bias=True),
        "head": product(weight),
    }


def packed_kernels() -> dict[str, Made]:
    found = {}
    for num_rows in ROWS_OF_PACKED:
        behind = "" if num_rows == NUM_ROWS else f" of {num_rows} rows"
        found |= {f"{name}{behind}": product(each, num_tile_rows=num_rows) for name, each in packed_forms().items()}
    few = {name.removesuffix(" of few columns"): each for name, each in packed_forms().items() if "few" in name}
    return found | {f"{name} in parts": product(each, num_parts=8) for name, each in few.items()}


QWEN3 = Routing(128, 8, Score.SOFTMAX)  # 30B A3B
GPT_OSS = Routing(128, 4, Score.SOFTMAX_OF_CHOSEN, is_normalised=False)  # 120B
MIXED = Routing(16, 2, Score.SPARSE_MIXER, is_normalised=False, jitter=0.01)
DEEPSEEK = Routing(256, 8, Score.SIGMOID, True, 1e-20, 2.5, 8, 4, rounds_logits=False, rounds_weights=False)
GEMMA4 = Routing(128, 8, Score.SOFTMAX, rounds_weights=False)  # 26B A4B


def expert_kernels(dtype: str) -> dict[str, Made]:
    """Return published models' experts, packed and in the dtype."""
    plain, number = torch.zeros(1, 2048, dtype=DTYPES[dtype]), DTYPES[dtype]
    found: dict[str, Made] = {
        "experts' router": (moe_router.multiply_router, moe_router.router_constants(2880, 128)),
        "choice of Qwen3": chosen_by(QWEN3, 2048, number, False, False, False),
        "choice of Qwen2, with a share": chosen_by(Routing(60, 4, Score.SOFTMAX), 2048, number, False, False, True),
        "choice of gpt-oss": chosen_by(GPT_OSS, 2880, number, True, False, False),
        "choice of Phi-3.5": chosen_by(MIXED, 4096, number, False, False, False),
        "choice of DeepSeek": chosen_by(DEEPSEEK, 7168, number, False, True, False),
        "choice of Gemma 4": chosen_by(GEMMA4, 2816, number, False, False, False, has_scales=True),
        "sort of choices": (moe_router.sort_choices, moe_router.sort_constants(QWEN3)),
        "sort of choices among 512 experts": (
            moe_router.sort_choices,
            moe_router.sort_constants(Routing(512, 10, Score.SOFTMAX)),
        ),
        "experts' gates and ups": expert_product(QWEN3, plain, is_gated=True),
        "experts' ups alone": expert_product(QWEN3, plain, is_gated=True, has_gates=False),
        "experts' downs": expert_product(QWEN3, plain, is_gated=False),
        "experts' downs on 8 GPUs": expert_product(QWEN3, plain, is_gated=False, num_ranks=8),
        "sum of choices": (moe_gemm.sum_choices, summed(False)),
        "sum of choices with a share": (moe_gemm.sum_choices, summed(True)),
    }
    return found | (packed_experts() if number == torch.bfloat16 else {})


def packed_experts() -> dict[str, Made]:
    """Return FP8 in blocks of 128, gpt-oss' MXFP4 with its limit, NVFP4, and int4 with offsets."""
    return {
        "FP8 experts": expert_product(QWEN3, packed_zeros("e4m3", 2048, 128, scale=WIDE), is_gated=True),
        "MXFP4 experts": expert_product(GPT_OSS, packed_zeros("e2m1", 2880, 32), is_gated=True, limit=7.0),
        "NVFP4 experts": expert_product(QWEN3, packed_zeros("e2m1", 2048, 16, scale=WIDE), is_gated=False),
        "int4 experts": expert_product(QWEN3, packed_zeros("uint4", 2048, 128, scale=WIDE, offset=1.0), is_gated=False),
    }


def chosen_by(
    routing: Routing,
    hidden: int,
    dtype: torch.dtype,
    has_bias: bool,
    has_choice_bias: bool,
    has_share: bool,
    has_scales: bool = False,
) -> Made:
    constants = moe_router.choice_constants(routing, hidden, dtype, has_bias, has_choice_bias, has_share)
    constants |= {} if has_bias else {"router_bias_ptr": None}
    constants |= {} if has_scales else {"choice_scales_ptr": None}
    return moe_router.choose_row, constants | ({} if has_choice_bias else {"choice_bias_ptr": None})


def expert_product(
    routing: Routing,
    weight: Weight,
    *,
    is_gated: bool,
    limit: float = 0.0,
    has_gates: bool = True,
    num_ranks: int = 1,
) -> Made:
    linear_of_all = linear_from(weight, torch.zeros(1) if limit else None)
    experts = StackedExperts(
        routing, torch.zeros(1, 1), linear_of_all, linear_of_all, None, None, limit, 1.702, has_gates
    )
    experts = replace(experts, num_own=routing.num_experts // num_ranks)
    constants = moe_gemm.tile_constants(experts, linear_of_all, is_gated, Activation.SILU) | {"NUM_RANKS": num_ranks}
    absent = [*["bias_ptr"] * (not limit), *["peers_ptr"] * (num_ranks == 1), *absent_parts(weight)]
    return moe_gemm.multiply_tile, constants | dict.fromkeys(absent)


def absent_parts(weight: Weight) -> list[str]:
    if isinstance(weight, PackedMatrix):
        return ["weight_ptr", *["offsets_ptr"] * (weight.offsets is None)]
    return ["codes_ptr", "scales_ptr", "offsets_ptr"]


def product(
    weight: Weight, *, has_bias: bool = False, num_tile_rows: int = NUM_ROWS, num_parts: int = 1, num_ranks: int = 1
) -> Made:
    constants = gemm.multiply_constants(weight, has_bias, num_tile_rows, num_parts) | {"NUM_RANKS": num_ranks}
    absent = ["bias_ptr"] * (not has_bias) + ["peers_ptr"] * (num_ranks == 1) + absent_parts(weight)
    return gemm.multiply_columns, constants | dict.fromkeys(absent)


def summed(has_share: bool) -> dict[str, Any]:
    constants = {"HIDDEN": 2048, "NUM_CHOSEN": 8, "COLUMNS": moe_gemm.SUMMED_COLUMNS}
    return constants | {"HAS_SHARED": has_share, "HAS_SHARE": has_share, "RANK": 0, "NUM_RANKS": 1}


def packed_zeros(
    code: Code, depth: int, group: int, *, scale: float = 1.0, offset: float = 0.0, num_columns: int = MANY_COLUMNS
) -> RepackedMatrix:
    """Return a matrix of zeros, whose columns are one column; `offset` is in scales."""
    codes, scales = (
        torch.zeros(1, depth * CODE_BITS[code] // 8, dtype=torch.uint8),
        torch.full((1, depth // group), scale),
    )
    made = repacked(PackedMatrix(code, codes, scales, torch.bfloat16, offset * scales if offset else None))
    scales, offsets = (None if each is None else each.expand(-1, num_columns) for each in (made.scales, made.offsets))
    return replace(made, codes=made.codes.expand(num_columns, -1), scales=scales, offsets=offsets)


def plain_zeros(dtype: str, num_columns: int = MANY_COLUMNS) -> torch.Tensor:
    return torch.zeros(1, HIDDEN, dtype=DTYPES[dtype]).expand(num_columns, -1)
