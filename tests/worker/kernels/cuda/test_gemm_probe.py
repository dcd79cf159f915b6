"""The probe of products finds a row whose bits depend on its place."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.kernels.cuda.gemm import LINEAR_KERNELS, triton_linear
from swiftbatch.worker.kernels.cuda.gemm_probe import refuse_uneven_products
from swiftbatch.worker.kernels.cuda.stacked_weights import stacked_weights
from swiftbatch.worker.kernels.kernel_sizes import FEW_ROWS, ROW_CHOICES
from tests.worker.exactness.gpu_doctor.small_parts import by_place, one_layer, row_by_row
from tests.worker.kernels.kernel_parts import FLOAT32, Shape
from tests.worker.kernels.packed_parts import packed_weights

NUM_ROWS = 8
WRONG = 5
WEIGHTS = one_layer(Shape(dtype=FLOAT32))


@pytest.mark.parametrize("number", range(len(WEIGHTS.products)))
def test_one_wrong_place_of_one_shape_is_refused_with_shape_and_row(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = WEIGHTS.products[number].weight.shape

    def uneven(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        row_by_row(rows, weight, bias, out)
        if weight.shape == wrong:
            out[WRONG, -1] = torch.nextafter(out[WRONG, -1], torch.tensor(torch.inf))

    monkeypatch.setitem(LINEAR_KERNELS, "cublas", uneven)
    words = rf"--linear cublas: with weights {re.escape(f'[{wrong[0]} x {wrong[1]}]')}.*row {WRONG} of {NUM_ROWS} "
    with pytest.raises(ModelError, match=rf"{words}.*use --linear triton"):
        refuse_uneven_products(WEIGHTS, "cublas", NUM_ROWS)


def test_products_row_by_row_pass_and_no_other_product_helps_where_triton_s_rows_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(LINEAR_KERNELS, "cublas", row_by_row)
    refuse_uneven_products(WEIGHTS, "cublas", NUM_ROWS)
    monkeypatch.setitem(LINEAR_KERNELS, "triton", by_place)
    with pytest.raises(ModelError, match="use --device cpu"):
        refuse_uneven_products(WEIGHTS, "triton", NUM_ROWS)


def test_a_narrower_forward_with_other_bits_is_refused_with_the_rows_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_width(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        row_by_row(rows, weight, bias, out[0] if out.dim() == 3 else out)
        if len(rows) == ROW_CHOICES[0]:
            out += 1

    monkeypatch.setitem(LINEAR_KERNELS, "triton", by_width)
    refuse_uneven_products(WEIGHTS, "triton", ROW_CHOICES[0])
    with pytest.raises(ModelError, match=r"row 0 of 64 has other bits than row 0 of 128 .*; use --rows 64"):
        refuse_uneven_products(WEIGHTS, "triton", ROW_CHOICES[1])


def test_few_rows_of_packed_weights_with_other_bits_leave_no_other_number_of_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stacked = stacked_weights(packed_weights(Shape(), "uint4", 16, has_offsets=True), torch.device("cpu"))

    def by_width(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        out[:] = float(len(rows) == FEW_ROWS)

    monkeypatch.setitem(LINEAR_KERNELS, "triton", by_width)
    with pytest.raises(ModelError, match=r"row 0 of 32 has other bits than row 0 of 64 .*; use --device cpu"):
        refuse_uneven_products(stacked, "triton", ROW_CHOICES[0])


def test_parts_that_a_norm_sums_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = one_layer(Shape())

    def uneven(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        triton_linear(rows, weight, bias, out)
        if out.dim() == 3:
            out[-1, WRONG, -1] += 1

    monkeypatch.setitem(LINEAR_KERNELS, "triton", uneven)
    with pytest.raises(ModelError, match=f"row {WRONG} of 64 has other bits than row 0 of 64"):
        refuse_uneven_products(weights, "triton", ROW_CHOICES[0])


def test_every_shape_is_tried_once_in_every_place(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[tuple[int, ...]]()

    def noted(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        tried.append(tuple(weight.shape))
        row_by_row(rows, weight, bias, out)

    monkeypatch.setitem(LINEAR_KERNELS, "cublas", noted)
    refuse_uneven_products(WEIGHTS, "cublas", NUM_ROWS)
    shapes = {tuple(product.weight.shape) for product in WEIGHTS.products}
    assert sorted(tried) == sorted(shape for shape in shapes for _ in range(NUM_ROWS))
