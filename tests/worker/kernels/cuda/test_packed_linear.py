"""Packed products have the bits of plain ones over the dequantized matrix."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from swiftbatch.worker.kernels.cuda.gemm import assembly, triton_linear
from swiftbatch.worker.kernels.cuda.repacked_weights import FACTORS, is_multiplied_packed, repacked
from swiftbatch.worker.kernels.kernel_sizes import NUM_ROWS
from swiftbatch.worker.kernels.quantized_weights import CODE_BITS, TABLES, Code, PackedMatrix
from tests.worker.kernels.cuda.arenas import normal
from tests.worker.kernels.cuda.ptx_on_cpu import run
from tests.worker.kernels.kernel_parts import BF16, FLOAT32
from tests.worker.kernels.packed_parts import random_packed

CODES = sorted(TABLES)
WHOLE = 0
SIZES = [(48, 256, 128), (33, 400, 16), (40, 160, 32), (40, 320, 64), (33, 80, WHOLE), (33, 48, WHOLE), (5, 512, 256)]


def products(matrix: PackedMatrix, bias: Tensor | None, out: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the kernel's, and the plain kernel's over the twin."""
    columns, depth = matrix.shape
    rows = normal(NUM_ROWS, depth, dtype=matrix.dtype)
    found, expected = (torch.full((NUM_ROWS, columns), float("nan"), dtype=out) for _ in range(2))
    triton_linear(rows, repacked(matrix), bias, found)
    triton_linear(rows, matrix.dequantized(), bias, expected)
    return found, expected


@pytest.mark.sample(3)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(("columns", "depth", "group"), SIZES)
@pytest.mark.parametrize("has_offsets", [False, True], ids=["scaled", "shifted"])
def test_a_product_has_the_bits_of_the_dequantized_matrix_s(
    code: Code, columns: int, depth: int, group: int, has_offsets: bool
) -> None:
    for dtype, out, has_bias in ((BF16, BF16, False), (BF16, FLOAT32, True), (FLOAT32, FLOAT32, True)):
        matrix = random_packed(code, columns, depth, group or depth, has_offsets=has_offsets, dtype=dtype)
        assert is_multiplied_packed(matrix) == (dtype == BF16)
        found, expected = products(matrix, normal(columns, dtype=dtype, seed=2) if has_bias else None, out)
        assert expected.isfinite().all()
        assert torch.equal(found, expected)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dtype", [BF16, FLOAT32], ids=str)
def test_every_code_becomes_the_number_of_its_table(code: Code, dtype: torch.dtype) -> None:
    """Each row picks one number; scales leave 24 significant bits to round."""
    num_codes = len(TABLES[code])
    matrix = random_packed(code, 24, num_codes, num_codes, dtype=dtype)
    codes = torch.arange(num_codes, dtype=torch.uint8)
    codes = codes[::2] | codes[1::2] << 4 if num_codes == 16 else torch.where((codes & 127) == 127, 0, codes)
    scales = matrix.scales * (1 + 2**-11 + 2**-20)
    matrix = PackedMatrix(code, codes.repeat(24, 1), scales, dtype)
    for first in range(0, num_codes, NUM_ROWS):
        rows = torch.eye(max(num_codes, NUM_ROWS), dtype=dtype)[first : first + NUM_ROWS, :num_codes].contiguous()
        found = torch.zeros(NUM_ROWS, 24)
        triton_linear(rows, repacked(matrix), None, found)
        assert torch.equal(found[:num_codes], matrix.dequantized().float().t()[first : first + NUM_ROWS])


def test_groups_that_straddle_blocks_of_the_depth_and_codes_without_a_number_are_not_for_the_kernel() -> None:
    assert not is_multiplied_packed(random_packed("int8", 8, 96, 48))
    assert not is_multiplied_packed(random_packed("uint4", 8, 400, 80))
    matrix = random_packed("e4m3", 8, 64, 64)
    assert is_multiplied_packed(matrix)
    matrix.codes[3, 5] = 255
    assert not is_multiplied_packed(matrix)


@pytest.mark.parametrize("zero", [0, 8])
@pytest.mark.parametrize("code", CODES)
def test_the_assembly_of_a_gpu_gives_every_code_s_number_exactly(code: Code, zero: int) -> None:
    """All pairs of words occur with each code at each place, and `run` refuses to round."""
    if zero and code != "uint4":
        return
    num_bits = CODE_BITS[code]
    places, table = 16 // num_bits, TABLES[code].double().nan_to_num(0.0) - zero
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 1 << num_bits, (4096, 2 * places), generator=generator)
    codes[: 1 << num_bits] = torch.arange(1 << num_bits)[:, None]
    if code == "e4m3":
        codes[(codes & 127) == 127] = 3  # which are no numbers
    words = sum((codes[:, place] << num_bits * place for place in range(2 * places)), torch.zeros(4096).long())
    matrix = random_packed(code, 4, 128, 128)
    offsets = -8 * matrix.scales if zero else None
    found = run(assembly(repacked(dataclasses.replace(matrix, offsets=offsets))), words, places)
    for place, pairs in enumerate(found):
        for half in (0, 1):
            expected = table[codes[:, half * places + place]]
            assert torch.equal(pairs[:, half] * FACTORS.get(code, 1), expected), (place, half)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(("columns", "depth", "group"), [*SIZES, (130, 128, 128), (128, 384, 128)])
@pytest.mark.parametrize("has_offsets", [False, True], ids=["scaled", "shifted"])
def test_a_repacked_matrix_can_be_read_again(
    code: Code, columns: int, depth: int, group: int, has_offsets: bool
) -> None:
    matrix = random_packed(code, columns, depth, group or depth, has_offsets=has_offsets)
    made = repacked(matrix)
    again = made.original()
    assert made.padded_depth % 128 == 0
    assert (made.shape, made.form) == (matrix.shape, matrix.form)
    assert torch.equal(again.codes, matrix.codes)
    assert torch.equal(again.scales, matrix.scales)
    assert (again.offsets is None) == (matrix.offsets is None)
    assert again.offsets is None or torch.equal(again.offsets, matrix.offsets)


def of_bfloat16(matrix: PackedMatrix, zero: int) -> PackedMatrix:
    scales = matrix.scales.bfloat16().float()
    return dataclasses.replace(matrix, scales=scales, offsets=-zero * scales if zero else None)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("group", [32, 128])
def test_a_scale_in_bfloat16_rounds_each_number_once_as_its_twin(code: Code, group: int) -> None:
    """A code's number and the scale have 8 bits each, so float32 has their product exactly."""
    matrix = of_bfloat16(random_packed(code, 48, 256, group), 8 if code == "uint4" else 0)
    made = repacked(matrix)
    assert made.is_narrow
    assert made.offsets is None
    codes = matrix.codes if CODE_BITS[code] == 8 else torch.stack((matrix.codes & 15, matrix.codes >> 4), -1).flatten(1)
    numbers = TABLES[code][codes.long()] - made.zero
    narrow = numbers.bfloat16()
    assert torch.equal(narrow.float(), numbers)  # what the assembly gives
    scales = matrix.scales.bfloat16().repeat_interleave(group, 1)
    assert torch.equal(narrow * scales, matrix.dequantized())  # one rounding, as of `mul.bf16x2`
    found, expected = products(matrix, None, FLOAT32)
    assert torch.equal(found, expected)


def test_offsets_and_scales_that_bfloat16_rounds_are_kept_in_float32() -> None:
    matrix = random_packed("uint4", 48, 256, 128)
    assert not repacked(matrix).is_narrow
    shifted = dataclasses.replace(matrix, offsets=-8 * matrix.scales)
    assert (repacked(shifted).zero, repacked(shifted).offsets) == (8, None)
    of_bytes = dataclasses.replace(shifted, code="uint8", codes=matrix.codes.repeat(1, 2), offsets=-128 * matrix.scales)
    assert (repacked(of_bytes).code, repacked(of_bytes).offsets) == ("int8", None)
    assert torch.equal(repacked(of_bytes).dequantized(), of_bytes.dequantized())
    other = dataclasses.replace(matrix, offsets=-7 * matrix.scales)
    assert (repacked(other).zero, repacked(other).scales.dtype) == (0, FLOAT32)
    assert repacked(other).offsets is not None


def test_scales_that_overflow_with_the_kernel_s_factor_are_not_for_the_kernel() -> None:
    matrix = random_packed("e2m1", 8, 64, 32)
    matrix.scales[3, 1] = 4.0  # times 2^126
    assert not is_multiplied_packed(matrix)
