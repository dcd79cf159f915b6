from __future__ import annotations

import pytest
import torch
from torch import Tensor

from swiftbatch.worker.kernels.cuda import gemm
from swiftbatch.worker.kernels.cuda.gemm import LinearKernel, cublas_linear, triton_linear
from swiftbatch.worker.kernels.cuda.repacked_weights import repacked
from swiftbatch.worker.kernels.kernel_sizes import NUM_ROWS, parts_of_depth
from swiftbatch.worker.kernels.quantized_weights import Code, Weight, plain
from tests.worker.kernels.cuda.arenas import normal
from tests.worker.kernels.kernel_parts import BF16, FLOAT32
from tests.worker.kernels.packed_parts import random_packed

SIZES = [(48, 16), (100, 128), (33, 400)]  # columns and depth


def product(kernel: LinearKernel, rows: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    out = torch.full((NUM_ROWS, len(weight)), float("nan"), dtype=dtype)
    kernel(rows, weight, bias, out)
    return out


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("columns", "depth"), SIZES)
@pytest.mark.parametrize(
    ("kernel", "dtype", "out"),
    [
        (cublas_linear, FLOAT32, FLOAT32),
        (cublas_linear, BF16, BF16),
        (triton_linear, FLOAT32, FLOAT32),
        (triton_linear, BF16, BF16),
        (triton_linear, BF16, FLOAT32),
    ],
)
def test_a_product_is_as_in_float64(
    kernel: LinearKernel, dtype: torch.dtype, out: torch.dtype, columns: int, depth: int, has_bias: bool
) -> None:
    rows, weight = normal(NUM_ROWS, depth, dtype=dtype), normal(columns, depth, dtype=dtype, seed=1)
    bias = normal(columns, dtype=dtype, seed=2) if has_bias else None
    exact = torch.nn.functional.linear(rows.double(), weight.double(), None if bias is None else bias.double())
    found = product(kernel, rows, weight, bias, out).double()
    assert ((found - exact).abs() <= torch.finfo(out).eps * exact.abs() + 1e-6 * depth).all()


@pytest.mark.parametrize("has_bias", [False, True])
def test_logits_of_bfloat16_weights_are_asked_of_cublas_in_float32(has_bias: bool) -> None:
    rows, weight, bias = (torch.empty(size, dtype=BF16, device="meta") for size in ((NUM_ROWS, 48), (100, 48), (100,)))
    out = torch.empty(NUM_ROWS, 100, device="meta")  # a CPU lacks this product; at least its arguments are torch's
    cublas_linear(rows, weight, bias if has_bias else None, out)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [BF16, FLOAT32], ids=str)
def test_a_row_has_the_same_bits_in_all_places_among_any_neighbours(dtype: torch.dtype) -> None:
    weight, bias = normal(100, 400, dtype=dtype), normal(100, dtype=dtype, seed=1)
    row = normal(400, dtype=dtype, seed=2)
    expected = product(triton_linear, row.expand(NUM_ROWS, -1).contiguous(), weight, bias, FLOAT32)[0]
    for place in range(NUM_ROWS):
        rows = normal(NUM_ROWS, 400, dtype=dtype, seed=3 + place)
        rows[place] = row
        rows[(place + 1) % NUM_ROWS] = float("nan")
        assert torch.equal(product(triton_linear, rows, weight, bias, FLOAT32)[place], expected)


ROWS = (16, 32, 64, 128, 256)


@pytest.mark.parametrize("code", [None, "uint4", "e4m3"])
def test_any_number_of_rows_gives_a_row_the_same_bits_in_any_place(code: Code | None) -> None:
    """Checks all pairs of numbers of rows, and the sums against float64."""
    weight: Weight = normal(140, 400, dtype=BF16)
    if code is not None:
        weight = repacked(random_packed(code, 140, 400, 16, has_offsets=code == "uint4"))
    rows = normal(max(ROWS), 400, dtype=BF16, seed=1)
    found = {}
    for num_rows in ROWS:
        for first in sorted({0, min(num_rows // 2, max(ROWS) - num_rows), max(ROWS) - num_rows}):
            out = torch.full((num_rows, 140), float("nan"))
            triton_linear(rows[first : first + num_rows].contiguous(), weight, None, out)
            found[num_rows, first] = out
    for (num_rows, first), mine in found.items():
        for (num_others, other), its in found.items():
            start, end = max(first, other), min(first + num_rows, other + num_others)
            if start < end:
                assert torch.equal(mine[start - first : end - first], its[start - other : end - other])
    numbers = plain(weight).double()
    exact, sizes = rows.double() @ numbers.t(), rows.double().abs() @ numbers.abs().t()
    assert ((found[256, 0].double() - exact).abs() <= 1e-6 * sizes).all()


@pytest.mark.parametrize("code", [None, "uint4"])
@pytest.mark.parametrize(("depth", "num_parts"), [(64, 1), (400, 4), (1024, 8), (1300, 8)])
def test_parts_of_the_depth_are_summed_for_any_number_of_rows_alike(
    code: Code | None, depth: int, num_parts: int
) -> None:
    weight: Weight = normal(80, depth, dtype=BF16)
    if code is not None:
        weight = repacked(random_packed(code, 80, depth, 4, has_offsets=True))
    rows, bias = normal(128, depth, dtype=BF16, seed=1), normal(80, dtype=BF16, seed=2)
    assert parts_of_depth(depth) == num_parts
    wide, narrow = (torch.full((num_parts, number, 80), float("nan")) for number in (128, 64))
    triton_linear(rows, weight, bias, wide)
    triton_linear(rows[:64].contiguous(), weight, bias, narrow)
    assert torch.equal(wide[:, :64], narrow)
    numbers = plain(weight).double()
    exact, sizes = rows.double() @ numbers.t() + bias, rows.double().abs() @ numbers.abs().t()
    assert ((wide.double().sum(0) - exact).abs() <= 1e-6 * sizes + 1e-6).all()


def test_tiles_of_few_and_many_columns_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weight = normal(NUM_ROWS, 400, dtype=BF16), normal(150, 400, dtype=BF16, seed=1)
    assert gemm.tile_columns(weight) == 64
    found = product(triton_linear, rows, weight, None, FLOAT32)
    monkeypatch.setattr(gemm, "MANY_COLUMNS", 0)
    assert gemm.tile_columns(weight) == 128
    assert torch.equal(product(triton_linear, rows, weight, None, FLOAT32), found)


def test_another_block_of_the_depth_gives_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weight = normal(NUM_ROWS, 400, dtype=FLOAT32), normal(48, 400, dtype=FLOAT32, seed=1)
    found = product(triton_linear, rows, weight, None, FLOAT32)
    monkeypatch.setattr(gemm, "BLOCK_DEPTH", 64)
    assert not torch.equal(product(triton_linear, rows, weight, None, FLOAT32), found)
