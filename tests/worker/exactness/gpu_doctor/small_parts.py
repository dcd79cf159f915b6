"""One layer and few trials, because a forward takes the interpreter a second."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from swiftbatch.jobs.run.run_records import LinearName
from swiftbatch.worker.exactness.gpu_doctor.model_under_test import Extent, Parts
from swiftbatch.worker.kernels.cuda.stacked_weights import StackedWeights, stacked_weights
from swiftbatch.worker.kernels.gpu_kernel_choice import CudaKernels
from swiftbatch.worker.model.model_files import ModelFiles
from tests.worker.kernels.kernel_parts import FLOAT32, Shape, random_weights

CPU = torch.device("cpu")
SMALL = Extent(
    num_tries=1,
    lengths=(0, 65, 300),
    row_counts=(1, 4),
    slot_counts=(1, 2),
    many_slots=(3, 70),
    mixed_length=140,
    num_positions=16,
    num_rows=1,
    most_nodes=2,
    work_lengths=(3,),
    num_compared=20,
    read_bytes=1 << 20,
    num_rounds=1,
)


def one_layer(shape: Shape) -> StackedWeights:
    weights = random_weights(shape)
    sizes = dataclasses.replace(weights.sizes, num_layers=1)
    return stacked_weights(dataclasses.replace(weights, sizes=sizes, layers=weights.layers[:1]), CPU)


def small_parts(files: ModelFiles, dtype: torch.dtype = FLOAT32, linear: LinearName = "triton") -> Parts:
    weights = one_layer(Shape(dtype=dtype))
    return Parts(files, dtype, CPU, lambda: weights, SMALL, CudaKernels(linear=linear))


def row_by_row(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    for place, row in enumerate(rows):
        out[place] = (row.float() * weight.float()).sum(-1) + (0.0 if bias is None else bias.float())


def by_place(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Make the second half of rows one unit in the last place higher."""
    row_by_row(rows, weight, bias, out)
    half = out[len(out) // 2 :]
    half.copy_(torch.nextafter(half, half + 1))


def a_little_off(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    row_by_row(rows, weight, bias, out)
    out *= 1.001
