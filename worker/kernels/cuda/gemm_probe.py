"""Probe of a GPU's matrix products: a row must have the same bits at every index of every forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.run.run_records import LinearName
from swiftbatch.worker.kernels.cuda.gemm import LINEAR_KERNELS, LinearKernel
from swiftbatch.worker.kernels.cuda.repacked_weights import RepackedMatrix
from swiftbatch.worker.kernels.cuda.stacked_weights import StackedWeights
from swiftbatch.worker.kernels.kernel_sizes import NUM_ROWS, narrower_rows, parts_of_depth
from swiftbatch.worker.kernels.quantized_weights import AnyLinear


def refuse_uneven_products(weights: StackedWeights, name: LinearName, num_rows: int) -> None:
    """Try each form of the model's products. Raises ModelError if a row's bits depend on its index.

    Products in Triton are tried in forwards of each smaller number of rows, too, and in parts of the depth where the
    next norm sums these: up to 900 launches for each form. It holds logits of one forward.
    """
    dtype, widths, found = weights.sizes.dtype, [num_rows], {}
    if name == "triton":
        widths += narrower_rows(num_rows, weights.gains_by_few_rows)
    for product in weights.products[:-1]:
        columns, depth = product.weight.shape
        has_parts = name == "triton" and columns == weights.sizes.hidden
        for out in [(None, dtype), *([(parts_of_depth(depth), torch.float32)] if has_parts else [])]:
            found[_form(product, *out)] = product, *out
    found[_form(weights.head, None, torch.float32)] = weights.head, None, torch.float32
    for product, num_parts, out_dtype in found.values():
        for width, place in uneven_places(LINEAR_KERNELS[name], product, widths, dtype, out_dtype, num_parts=num_parts):
            columns, depth = product.weight.shape
            others = "--device cpu" if name == "triton" else "--linear triton"
            instead = f"--rows {width}" if NUM_ROWS <= width < num_rows else others
            raise ModelError(
                f"--linear {name}: with weights [{columns} x {depth}]{'' if product.bias is None else ' and a bias'}, "
                f"row {place} of {width} has other bits than row 0 of {num_rows} on this GPU, so tokens would depend "
                f"on the batch; use {instead} in a new run"
            )


def _form(product: AnyLinear, num_parts: int | None, out_dtype: torch.dtype) -> tuple[object, ...]:
    weight = product.weight
    packed = (weight.form, weight.zero, weight.is_narrow) if isinstance(weight, RepackedMatrix) else None
    return tuple(weight.shape), product.bias is None, packed, num_parts, out_dtype


def uneven_places(
    kernel: LinearKernel,
    product: AnyLinear,
    widths: Sequence[int],
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    seed: int = 0,
    num_parts: int | None = None,
) -> list[tuple[int, int]]:
    """Return numbers of rows, and indices, at which one row has other bits than at index 0 of the first number's.

    Its neighbours change, too.
    """
    columns, depth = product.weight.shape
    device = product.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    given = torch.randn(1 + max(widths), depth, generator=generator, device=device).to(dtype)
    places = [(width, place) for width in widths for place in range(width)]
    expected, uneven = None, torch.zeros(len(places), dtype=torch.bool, device=device)
    for number, (width, place) in enumerate(places):
        rows = given[1 : 1 + width].roll(place, 0)
        rows[place] = given[0]
        shape = (width, columns) if num_parts is None else (num_parts, width, columns)
        out = torch.zeros(shape, dtype=out_dtype, device=device)
        kernel(rows, product.weight, product.bias, out)
        found = bits(out[..., place, :])
        expected = found if expected is None else expected
        uneven[number] = (found != expected).any()
    return [places[number] for number in uneven.nonzero().flatten().tolist()]


def bits(numbers: Tensor) -> Tensor:
    return numbers.view(torch.int16 if numbers.element_size() == 2 else torch.int32)
