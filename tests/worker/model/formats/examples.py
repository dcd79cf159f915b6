"""Matrices in every supported format, and their numbers.

Numbers follow the formats' definitions in numpy's float32, without the readers' code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

F32 = np.float32
Parts = dict[str, Tensor]  # by the end of their names after the module's
Value = Callable[[int, int], Any]  # the number in a row and a column
Made = tuple[Parts, Value]
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # a word's columns from its lowest bits on


@dataclass(frozen=True)
class Example:
    """A format: its config, and a matrix of given size."""

    config: dict[str, Any]
    make: Callable[[int, int, torch.Generator], Made]
    file: dict[str, Any] = field(default_factory=dict)  # hf_quant_config.json
    packs_head: bool = False


@functools.cache
def e4m3(byte: int) -> Any:
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return F32(-value if sign else value)


@functools.cache
def e2m1(code: int) -> Any:
    return F32(-E2M1[code & 7] if code & 8 else E2M1[code & 7])


def rows_of(values: Tensor) -> list[list[Any]]:
    """numpy float32 in lists indexes faster than arrays."""
    return [list(row) for row in values.float().numpy()] if values.is_floating_point() else values.tolist()


def random_e4m3(shape: tuple[int, ...], numbers: torch.Generator) -> Tensor:
    codes = torch.randint(0, 0x7F, shape, generator=numbers) + 128 * torch.randint(0, 2, shape, generator=numbers)
    return codes.to(torch.uint8).view(torch.float8_e4m3fn)


def random_scales(shape: tuple[int, ...], size: float, numbers: torch.Generator, dtype: torch.dtype) -> Tensor:
    return (size * (0.5 + torch.rand(shape, generator=numbers))).to(dtype)


def bits_of(codes: list[int], bits: int) -> list[int]:
    """Pack codes, lowest bits first, into signed 32-bit words."""
    stream = sum(code << number * bits for number, code in enumerate(codes))
    words = [stream >> 32 * number & 0xFFFFFFFF for number in range(-(-len(codes) * bits // 32))]
    return [word - 2**32 if word >= 2**31 else word for word in words]


def fp8(block: list[int] | None, dtype: torch.dtype = torch.float32, scale: str = "weight_scale_inv") -> Example:
    def make(rows: int, columns: int, numbers: torch.Generator) -> Made:
        codes, (height, width) = random_e4m3((rows, columns), numbers), block or (rows, columns)
        shape = (-(-rows // height), -(-columns // width)) if block else (1,)
        scales = random_scales(shape, 2e-3, numbers, dtype)
        grid, stored = rows_of(scales.reshape(-1, shape[-1])), rows_of(codes.view(torch.uint8))
        return {"weight": codes, scale: scales}, lambda r, c: e4m3(stored[r][c]) * grid[r // height][c // width]

    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": block}
    return Example(config | {"modules_to_not_convert": ["lm_head"]}, make)


def floats_by_row(rows: int, columns: int, numbers: torch.Generator) -> Made:
    codes, scales = (
        random_e4m3((rows, columns), numbers),
        random_scales((rows, 1), 2e-3, numbers, torch.bfloat16),
    )
    stored, by_row = rows_of(codes.view(torch.uint8)), rows_of(scales)
    return {"weight": codes, "weight_scale": scales}, lambda r, c: e4m3(stored[r][c]) * by_row[r][0]


def floats_of_tensor(rows: int, columns: int, numbers: torch.Generator) -> Made:
    codes, scale = random_e4m3((rows, columns), numbers), random_scales((), 2e-3, numbers, torch.float32)
    stored, one = rows_of(codes.view(torch.uint8)), F32(scale.item())
    parts = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.5)}
    return parts, lambda r, c: e4m3(stored[r][c]) * one


def floats_beside_nvfp4(rows: int, columns: int, numbers: torch.Generator) -> Made:
    """Make FP8 of attention's matrices, and NVFP4 of all others, without scales of inputs."""
    in_attention = (rows, columns) in ((128, 64), (64, 64), (64, 128))
    return (floats_of_tensor if in_attention else nvfp4(False))(rows, columns, numbers)


def bytes_by_row(zeros: bool) -> Callable[[int, int, torch.Generator], Made]:
    def make(rows: int, columns: int, numbers: torch.Generator) -> Made:
        codes = torch.randint(-128, 128, (rows, columns), generator=numbers).to(torch.int8)
        scales = random_scales((rows, 1), 2e-3, numbers, torch.float32 if not zeros else torch.bfloat16)
        zero = torch.randint(-128, 128, (rows, 1), generator=numbers).to(torch.int8)
        parts, by_row, stored = {"weight": codes, "weight_scale": scales}, rows_of(scales), rows_of(codes)
        if not zeros:
            return parts, lambda r, c: F32(stored[r][c]) * by_row[r][0]
        parts["weight_zero_point"], offsets = zero, rows_of(zero)
        return parts, lambda r, c: F32(stored[r][c] - offsets[r][0]) * by_row[r][0]

    return make


def packed_rows(
    bits: int, group: int, zeros: bool, dtype: torch.dtype = torch.bfloat16, is_shuffled: bool = False
) -> Callable[[int, int, torch.Generator], Made]:
    def make(rows: int, columns: int, numbers: torch.Generator) -> Made:
        codes = torch.randint(0, 2**bits, (rows, columns), generator=numbers).tolist()
        num_groups = columns // group
        scales = random_scales((rows, num_groups), 0.5 / 2**bits, numbers, dtype)
        zero = torch.full((rows, num_groups), 2 ** (bits - 1))
        place = torch.arange(columns) // group
        if is_shuffled:
            place = place[torch.randperm(columns, generator=numbers)]
        parts = {
            "weight_packed": torch.tensor([bits_of(row, bits) for row in codes], dtype=torch.int32),
            "weight_scale": scales,
            "weight_shape": torch.tensor([rows, columns]),
        }
        if is_shuffled:
            parts["weight_g_idx"] = place.to(torch.int32)
        if zeros:
            zero = torch.randint(0, 2**bits, (rows, num_groups), generator=numbers)
            words = [bits_of(column, bits) for column in zero.T.tolist()]
            parts["weight_zero_point"] = torch.tensor(words, dtype=torch.int32).T.contiguous()
        by_group, offsets, places = rows_of(scales), rows_of(zero), place.tolist()
        return parts, lambda r, c: F32(codes[r][c] - offsets[r][places[c]]) * by_group[r][places[c]]

    return make


def nvfp4(is_divided: bool) -> Callable[[int, int, torch.Generator], Made]:
    def make(rows: int, columns: int, numbers: torch.Generator) -> Made:
        codes = torch.randint(0, 256, (rows, columns // 2), generator=numbers).to(torch.uint8)
        groups = torch.randint(0x30, 0x60, (rows, columns // 16), generator=numbers).to(torch.uint8)
        scales = groups.view(torch.float8_e4m3fn)
        if is_divided:
            whole = torch.tensor([137.3])
            parts = {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": whole}
        else:
            whole = torch.tensor(0.0073)
            parts = {"weight": codes, "weight_scale": scales, "weight_scale_2": whole}
        one, pairs, by_group = F32(whole.item()), rows_of(codes), rows_of(groups)

        def value(r: int, c: int) -> Any:
            scale = e4m3(by_group[r][c // 16])
            return e2m1(pairs[r][c // 2] >> 4 * (c % 2) & 15) * (scale / one if is_divided else scale * one)

        return parts, value

    return make


def mxfp4_rows(rows: int, columns: int, numbers: torch.Generator) -> Made:
    codes = torch.randint(0, 256, (rows, columns // 2), generator=numbers).to(torch.uint8)
    exponents = torch.randint(119, 124, (rows, columns // 32), generator=numbers).to(torch.uint8)
    pairs, by_group = rows_of(codes), rows_of(exponents)

    def value(r: int, c: int) -> Any:
        return e2m1(pairs[r][c // 2] >> 4 * (c % 2) & 15) * F32(2.0 ** (by_group[r][c // 32] - 127))

    return {"weight_packed": codes, "weight_scale": exponents}, value


def gptq(bits: int, group: int, zero_is_less: int = 1, is_shuffled: bool = False) -> Example:
    def make(rows: int, columns: int, numbers: torch.Generator) -> Made:
        size = columns if group == -1 else group
        num_groups = columns // size
        codes = torch.randint(0, 2**bits, (rows, columns), generator=numbers).tolist()
        zero = torch.randint(0, 2**bits, (num_groups, rows), generator=numbers)
        scales = random_scales((num_groups, rows), 0.5 / 2**bits, numbers, torch.float16)
        place = torch.arange(columns) // size
        if is_shuffled:
            place = place[torch.randperm(columns, generator=numbers)]
        parts = {
            "qweight": torch.tensor([bits_of(row, bits) for row in codes], dtype=torch.int32).T.contiguous(),
            "qzeros": torch.tensor([bits_of(row, bits) for row in zero.tolist()], dtype=torch.int32),
            "scales": scales,
            "g_idx": place.to(torch.int32),
        }
        by_group, offsets, places = rows_of(scales), rows_of(zero), place.tolist()
        return parts, lambda r, c: F32(codes[r][c] - offsets[places[c]][r] - zero_is_less) * by_group[places[c]][r]

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": is_shuffled, "sym": False}
    return Example(config | {"checkpoint_format": "gptq" if zero_is_less else "gptq_v2", "damp_percent": 0.01}, make)


def awq(rows: int, columns: int, numbers: torch.Generator) -> Made:
    codes = torch.randint(0, 16, (rows, columns), generator=numbers)
    zero = torch.randint(0, 16, (rows, columns // 32), generator=numbers)
    scales = random_scales((columns // 32, rows), 0.03, numbers, torch.float16)

    def words(values: Tensor) -> Tensor:
        found = [bits_of([row[at + i] for at in range(0, rows, 8) for i in AWQ_ORDER], 4) for row in values.T.tolist()]
        return torch.tensor(found, dtype=torch.int32)

    parts = {"qweight": words(codes), "qzeros": words(zero), "scales": scales}
    stored, offsets, by_group = rows_of(codes), rows_of(zero), rows_of(scales)
    return parts, lambda r, c: F32(stored[r][c] - offsets[r][c // 32]) * by_group[c // 32][r]


def compressed(form: str, make: Callable[[int, int, torch.Generator], Made], **weights: Any) -> Example:
    group = {"targets": ["Linear"], "weights": {"dynamic": False, **weights}, "input_activations": None}
    config = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"], "kv_cache_scheme": None}
    return Example(config | {"config_groups": {"group_0": group}, "quantization_status": "compressed"}, make)


def integers(bits: int, group: int | None, zeros: bool, **others: Any) -> Example:
    size = {} if group is None else {"group_size": group}
    strategy = "channel" if group is None else "group"
    said = {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": not zeros, **size}

    def make(rows: int, columns: int, numbers: torch.Generator) -> Made:
        return packed_rows(bits, group or columns, zeros, **others)(rows, columns, numbers)

    return compressed("pack-quantized", make, **said)


FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True}
OF_MODELOPT = {"producer": {"name": "modelopt", "version": "0.31.0"}}
MODELOPT_FP8 = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
MODELOPT_NVFP4 = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
WEIGHTS_ALONE = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
MODELOPT_MIXED = {  # as Qwen3.6 27B
    "quant_algo": "MIXED_PRECISION",
    "kv_cache_quant_algo": "FP8",
    "quantized_layers": {
        **{f"model.layers.0.self_attn.{part}_proj": {"quant_algo": "FP8"} for part in "qkvo"},
        **{f"model.layers.0.mlp.{part}_proj": WEIGHTS_ALONE for part in ("gate", "up", "down")},
        "lm_head": WEIGHTS_ALONE,
    },
}
EXAMPLES: dict[str, Example] = {
    "fp8 in blocks of 128": fp8([128, 128]),
    "fp8 in blocks that end within a row, scales of bf16": fp8([40, 48], torch.bfloat16),
    "fp8 in blocks that no groups follow": fp8([24, 20]),
    "fp8 with a scale per tensor": fp8(None),
    "fp8 as AutoFP8 names it": fp8(None, scale="weight_scale"),
    "compressed-tensors FP8 per row": compressed("float-quantized", floats_by_row, **FLOAT8, strategy="channel"),
    "compressed-tensors FP8 per tensor": compressed("naive-quantized", floats_of_tensor, **FLOAT8, strategy="tensor"),
    "compressed-tensors int8 per row": compressed("int-quantized", bytes_by_row(False), **INT8, symmetric=True),
    "compressed-tensors int8 with zeros": compressed("int-quantized", bytes_by_row(True), **INT8, symmetric=False),
    "compressed-tensors int4": integers(4, 32, False),
    "compressed-tensors int4 with zeros": integers(4, 16, True),
    "compressed-tensors int4, scales of float32": integers(4, 32, True, dtype=torch.float32),
    "compressed-tensors int4 in the order of activations": integers(4, 32, False, is_shuffled=True),
    "compressed-tensors int8 in groups": integers(8, 32, False),
    "compressed-tensors int8 in groups with zeros": integers(8, 32, True),
    "compressed-tensors int8 in groups with zeros, scales of float32": integers(8, 32, True, dtype=torch.float32),
    "compressed-tensors int3": integers(3, 32, True),
    "compressed-tensors int4 per row": integers(4, None, False),
    "compressed-tensors NVFP4": compressed(
        "nvfp4-pack-quantized", nvfp4(True), **FLOAT4, strategy="tensor_group", group_size=16
    ),
    "compressed-tensors MXFP4": compressed(
        "mxfp4-pack-quantized", mxfp4_rows, **FLOAT4, strategy="group", group_size=32, scale_dtype="torch.uint8"
    ),
    "ModelOpt FP8": Example({}, floats_of_tensor, {**OF_MODELOPT, "quantization": MODELOPT_FP8}),
    "ModelOpt FP8 in the config": Example({**OF_MODELOPT, **MODELOPT_FP8}, floats_of_tensor),
    "ModelOpt FP8 per row": Example(
        {**OF_MODELOPT, "quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, floats_by_row
    ),
    "ModelOpt NVFP4": Example({}, nvfp4(False), {**OF_MODELOPT, "quantization": MODELOPT_NVFP4}),
    "ModelOpt NVFP4 for weights alone": Example(
        {}, nvfp4(False), {**OF_MODELOPT, "quantization": MODELOPT_NVFP4 | WEIGHTS_ALONE}
    ),
    "ModelOpt NVFP4 beside FP8": Example(
        {**OF_MODELOPT, "quant_method": "modelopt", **MODELOPT_MIXED},
        floats_beside_nvfp4,
        {**OF_MODELOPT, "quantization": MODELOPT_MIXED},
        packs_head=True,
    ),
    "AWQ": Example(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        awq,
    ),
    "GPTQ int4": gptq(4, 32),
    "GPTQ int4 per row": gptq(4, -1),
    "GPTQ int4, second form": gptq(4, 32, zero_is_less=0),
    "GPTQ int4 in the order of activations": gptq(4, 32, is_shuffled=True),
    "GPTQ int8": gptq(8, 32),
    "GPTQ int3": gptq(3, 32),
    "GPTQ int2": gptq(2, 32),
}


def numbers_of(value: Value, rows: int, columns: int) -> Tensor:
    return torch.tensor(np.array([[value(r, c) for c in range(columns)] for r in range(rows)], dtype=F32))
