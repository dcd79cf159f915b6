"""Packed products have the bits of plain ones over the dequantized matrix."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from swiftbatch.worker.kernels.cuda.gemm import triton_linear
from swiftbatch.worker.kernels.cuda.repacked_weights import is_multiplied_packed, repacked
from swiftbatch.worker.kernels.kernel_sizes import NUM_ROWS
from swiftbatch.worker.kernels.quantized_weights import TABLES, Code, PackedMatrix
from tests.worker.kernels.kernel_parts import BF16, FLOAT32
from tests.worker.kernels.packed_parts import random_packed

CODES = sorted(TABLES)
WHOLE = 0
SIZES = [(48, 256, 128), (33, 400, 16), (40, 160, 32), (40, 320, 64), (33, 80, WHOLE), (33, 48, WHOLE), (5, 512, 256)]


def normal(*size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


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
