"""The stage of experts: rows of their own, and packed experts against dequantized ones, of random weights."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import torch

from bench.gpu.family_weights import DEVIATION
from bench.gpu.trial import Trial, Try
from swiftbatch.worker.exactness.batch_invariance import MAX_LENGTH, NUM_CACHES, probe_rows
from swiftbatch.worker.exactness.gpu_doctor.findings import Finding, Row, differing_bits
from swiftbatch.worker.exactness.gpu_doctor.forward_checks import ROOM, work_digest
from swiftbatch.worker.exactness.gpu_doctor.gemm_checks import random_matrix
from swiftbatch.worker.exactness.gpu_doctor.model_under_test import Parts
from swiftbatch.worker.kernels.cuda.stacked_weights import StackedExperts, StackedWeights
from swiftbatch.worker.kernels.decoder_weights import linear_from
from swiftbatch.worker.kernels.gpu_kernel_choice import CudaKernels
from swiftbatch.worker.kernels.layer_specs import Routing, Score
from swiftbatch.worker.kernels.quantized_weights import Code, PackedMatrix, Weight

FORMS: dict[str, tuple[Code, int, bool]] = {  # code, group, offsets
    "MXFP4": ("e2m1", 32, False),
    "NVFP4": ("e2m1", 16, False),
    "FP8": ("e4m3", 128, False),
    "int4": ("uint4", 128, True),
}
SMALLER = 2.0**-8  # scales, so that all sums are finite
PRODUCTS = CudaKernels(linear="triton")  # all of them by one kernel, as in models with packed weights
MOST_CHOSEN = 4  # of a row


def experts(trial: Trial) -> Iterator[Try]:
    """Trees of a model with experts against plain decoding; then every form against its dequantized twin."""
    yield "rows", functools.partial(_rows, trial)
    for name in FORMS:
        yield name, functools.partial(_twins, trial, name)


def _rows(trial: Trial) -> Finding:
    parts = trial.parts(PRODUCTS, dtype="bfloat16")
    weights, columns = parts.weights, trial.sizes.expert_width
    shapes = _shapes(trial)
    _take(parts, _with_experts(parts, weights, trial, [_plain(parts, shape) for shape in shapes]))
    target = parts.target(NUM_CACHES, MAX_LENGTH)
    found = probe_rows(target, parts.extent.num_rows // 4 or 1, most_nodes=parts.extent.most_nodes)
    words = f"{differing_bits(found.num_differing, found.num_rows, 'tree rows')}, experts of {columns} columns"
    return Finding(passed=found.num_differing == 0, words=words, rows=[])


def _twins(trial: Trial, name: str) -> Finding:
    parts, (code, group, has_offsets) = trial.parts(PRODUCTS, dtype="bfloat16"), FORMS[name]
    weights, lengths, rows = parts.weights, trial.sizes.shuffled_lengths[:2], list[Row]()
    packed = [
        _smaller(random_matrix(parts, code, shape, min(group, shape[1]), has_offsets)) for shape in _shapes(trial)
    ]
    forms: dict[str, list[Weight]] = {"packed": [*packed], "dequantized": [each.dequantized() for each in packed]}
    for form, matrices in forms.items():
        _take(parts, _with_experts(parts, weights, trial, matrices))
        target = parts.target(len(lengths), max(lengths) + ROOM)
        rows.append({"experts": f"{name}, {form}", "sha256": work_digest(target, lengths)[:16]})
        del target
        parts.forget_unused()
    is_same = rows[0]["sha256"] == rows[1]["sha256"]
    return Finding(
        passed=is_same, words=f"{'the same' if is_same else 'OTHER'} bits as the dequantized twin's", rows=rows
    )


def _take(parts: Parts, weights: StackedWeights) -> None:
    """Let the parts have these weights from now on."""
    parts.__dict__["loaded"] = weights


def _shapes(trial: Trial) -> list[tuple[int, int]]:
    """The shapes of gates and ups of all experts, and of their downs."""
    sizes, hidden = trial.sizes, trial.sizes.shape.hidden
    return [(sizes.num_experts * 2 * sizes.expert_width, hidden), (sizes.num_experts * hidden, sizes.expert_width)]


def _plain(parts: Parts, shape: tuple[int, int]) -> torch.Tensor:
    numbers = torch.empty(shape, dtype=parts.dtype, device=parts.device)
    return numbers.normal_(0.0, DEVIATION, generator=parts.generator(8))


def _smaller(matrix: PackedMatrix) -> PackedMatrix:
    offsets = None if matrix.offsets is None else SMALLER * matrix.offsets
    return replace(matrix, scales=SMALLER * matrix.scales, offsets=offsets)


def _with_experts(parts: Parts, weights: StackedWeights, trial: Trial, matrices: list[Weight]) -> StackedWeights:
    """The model with the same experts in every layer, in place of what all rows met."""
    number = trial.sizes.num_experts
    router = torch.randn(number, weights.sizes.hidden, generator=parts.generator(9), device=parts.device)
    gate_up, down = (linear_from(matrix) for matrix in matrices)
    made = StackedExperts(Routing(number, min(MOST_CHOSEN, number // 2), Score.SOFTMAX), router, gate_up, down)
    layers = [replace(layer, gate_up=None, down=None, experts=made) for layer in weights.layers]
    return replace(weights, layers=layers)
