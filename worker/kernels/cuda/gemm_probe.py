"""Probe of a GPU's matrix products: a row must have the same bits at every index of a forward."""

from __future__ import annotations

import torch
from torch import Tensor

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.run.run_records import LinearName
from swiftbatch.worker.kernels.cuda.gemm import LINEAR_KERNELS, LinearKernel
from swiftbatch.worker.kernels.cuda.repacked_weights import RepackedMatrix
from swiftbatch.worker.kernels.cuda.stacked_weights import StackedWeights
from swiftbatch.worker.kernels.quantized_weights import AnyLinear


def refuse_uneven_products(weights: StackedWeights, name: LinearName, num_rows: int) -> None:
    """Try each shape of the model's products. Raises ModelError if a row's bits depend on its index.

    It takes 0.3 s or less on a GPU, and holds logits of one forward.
    """
    dtype = weights.sizes.dtype
    found = {_form(product, dtype): (product, dtype) for product in weights.products[:-1]}
    found[_form(weights.head, torch.float32)] = weights.head, torch.float32
    for product, out_dtype in found.values():
        places = uneven_places(LINEAR_KERNELS[name], product, num_rows, dtype, out_dtype).nonzero()
        if len(places):
            columns, depth = product.weight.shape
            raise ModelError(
                f"--linear {name}: with weights [{columns} x {depth}]{'' if product.bias is None else ' and a bias'}, "
                f"row {int(places[0])} of {num_rows} has other bits than row 0 on this GPU, so tokens would depend on "
                f"the batch; use {'--linear triton' if name == 'cublas' else '--device cpu'} in a new run"
            )


def _form(product: AnyLinear, out_dtype: torch.dtype) -> tuple[object, ...]:
    weight = product.weight
    packed = (weight.form, weight.zero, weight.is_narrow) if isinstance(weight, RepackedMatrix) else None
    return tuple(weight.shape), product.bias is None, packed, out_dtype


def uneven_places(
    kernel: LinearKernel, product: AnyLinear, num_rows: int, dtype: torch.dtype, out_dtype: torch.dtype, seed: int = 0
) -> Tensor:
    """Return the indices `[num_rows] bool` at which one row has other bits than at index 0, with other neighbours."""
    columns, depth = product.weight.shape
    device = product.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    given = torch.randn(1 + num_rows, depth, generator=generator, device=device).to(dtype)
    out = torch.zeros(num_rows, columns, dtype=out_dtype, device=device)
    uneven = torch.zeros(num_rows, dtype=torch.bool, device=device)
    expected: Tensor | None = None
    for place in range(num_rows):
        rows = given[1:].roll(place, 0)
        rows[place] = given[0]
        kernel(rows, product.weight, product.bias, out)
        expected = bits(out[place]).clone() if expected is None else expected
        uneven[place] = (bits(out[place]) != expected).any()
    return uneven


def bits(numbers: Tensor) -> Tensor:
    return numbers.view(torch.int16 if numbers.element_size() == 2 else torch.int32)
