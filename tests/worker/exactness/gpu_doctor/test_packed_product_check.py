"""Packed products equal the plain kernel's over dequantized weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from swiftbatch.worker.config import Computation
from swiftbatch.worker.exactness.doctor_verdicts import known_verdict, verdict_key
from swiftbatch.worker.exactness.gpu_doctor import gemm_checks, gpu_doctor
from swiftbatch.worker.exactness.gpu_doctor.findings import Check, Finding
from swiftbatch.worker.exactness.gpu_doctor.gemm_checks import FORMS, check_gemms, check_packed_gemms
from swiftbatch.worker.exactness.gpu_doctor.gpu_doctor import FirstRun, run_checks
from swiftbatch.worker.exactness.gpu_doctor.model_under_test import Parts
from swiftbatch.worker.forward.hardware import hardware_of
from swiftbatch.worker.kernels.cuda.gemm import triton_linear
from swiftbatch.worker.kernels.cuda.stacked_weights import stacked_weights
from swiftbatch.worker.kernels.gpu_kernel_choice import CudaKernels
from swiftbatch.worker.kernels.kernel_sizes import NUM_ROWS
from swiftbatch.worker.kernels.native_library import chosen_numerics
from swiftbatch.worker.kernels.quantized_weights import TABLES, PackedMatrix, Weight
from swiftbatch.worker.model.model_files import ModelFiles, locate_model
from tests.worker.exactness.gpu_doctor.small_parts import CPU, SMALL, small_parts
from tests.worker.kernels.kernel_parts import BF16, FLOAT32, Shape
from tests.worker.kernels.packed_parts import packed_weights


def packed_parts(files: ModelFiles) -> Parts:
    weights = packed_weights(Shape(), "uint4", 16, has_offsets=True)
    sizes = dataclasses.replace(weights.sizes, num_layers=1)
    stacked = stacked_weights(dataclasses.replace(weights, sizes=sizes, layers=weights.layers[:1]), CPU)
    parts = small_parts(files, BF16)
    parts.load = lambda: stacked
    return parts


def one_unit_off(rows: Tensor, weight: Weight, bias: Tensor | None, out: Tensor) -> None:
    triton_linear(rows, weight, bias, out)
    if isinstance(weight, PackedMatrix):
        out[3, 1] = torch.nextafter(out[3, 1], out[3, 1] + 1)


def test_packed_weights_of_the_model_are_tried(embedded_files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = check_packed_gemms(packed_parts(embedded_files))
    assert (finding.passed, finding.words[:13]) == (True, "0 of 256 rows")
    names = ["q, k, v, uint4", "output, uint4", "gate, up, uint4", "down, uint4"]
    assert [row["weights"] for row in finding.rows] == names
    assert all(float(row["GB/s"]) > 0 for row in finding.rows)
    monkeypatch.setattr(gemm_checks, "triton_linear", one_unit_off)
    finding = check_packed_gemms(packed_parts(embedded_files))
    assert (finding.passed, finding.words[:13]) == (False, "4 of 256 rows")


def test_a_model_without_packed_weights_lends_its_shapes_and_fails_no_check(
    embedded_files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = small_parts(embedded_files, BF16)
    parts.extent = dataclasses.replace(SMALL, read_bytes=1)
    finding = check_packed_gemms(parts)
    assert (finding.passed, finding.unproved) == (True, None)
    fitting = [(depth, code) for depth in (48, 80, 128) for code, group, *_ in FORMS if depth % (group or depth) == 0]
    assert {(row["depth"], row["weights"]) for row in finding.rows} == {(d, f"random {code}") for d, code in fitting}
    assert {code for code, *_ in FORMS} == set(TABLES)
    assert sum(int(row["differing"]) for row in finding.rows) == 0
    assert {row["tried"] for row in finding.rows} == {NUM_ROWS}
    monkeypatch.setattr(gemm_checks, "triton_linear", one_unit_off)
    monkeypatch.setattr(gemm_checks, "FORMS", FORMS[:1])
    finding = check_packed_gemms(parts)
    assert (finding.passed, finding.unproved) == (True, "products with packed weights, which differ here")


def test_nothing_is_tried_in_float32(embedded_files: ModelFiles) -> None:
    finding = check_packed_gemms(small_parts(embedded_files, FLOAT32))
    assert (finding.passed, finding.rows) == (True, [])
    assert finding.words.startswith("not tried: packed weights are multiplied in bfloat16")


def test_a_packed_model_is_exact_with_the_kernels_that_were_asked_for(
    embedded_files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`triton` always runs its products, so no advice is needed."""

    def checked(parts: Parts, report: Callable[[str], None]) -> FirstRun:
        taken = Finding(passed=True, words="fine", rows=[], linear="triton")
        return run_checks(parts, report, [Check("products", "products hold", lambda parts: taken)])

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Parts, "of", lambda *args: packed_parts(embedded_files))
    monkeypatch.setattr(gpu_doctor, "run_checks", checked)
    monkeypatch.setattr(gpu_doctor, "resolve_device", lambda device: torch.device("cuda"))
    found = gpu_doctor.first_run(Computation(device="cuda", linear="cublas", num_threads=1), print)
    assert found is not None
    assert (found.verdict, found.linear, found.asked_linear) == ("exact", "triton", "triton")
    assert "use --linear" not in found.page()
    for kernels in (CudaKernels(linear="cublas"), CudaKernels(linear="triton")):
        key = verdict_key(
            locate_model("embedded").fingerprint, "bfloat16", "cuda", 1, hardware_of("cuda"), torch.__version__,
            chosen_numerics("cuda", "bfloat16", kernels),
        )  # fmt: skip
        assert known_verdict(key) == "exact"


@pytest.mark.long
def test_all_products_of_a_packed_model_are_by_one_kernel(embedded_files: ModelFiles) -> None:
    finding = check_gemms(packed_parts(embedded_files))
    assert (finding.passed, finding.linear, finding.words) == (True, "triton", "products by triton")
    assert {row["kernel"] for row in finding.rows} == {"triton"}
