from __future__ import annotations

import pytest

from swiftbatch.worker.exactness.gpu_doctor.gemm_checks import check_gemms
from swiftbatch.worker.kernels.cuda.gemm import LINEAR_KERNELS
from swiftbatch.worker.kernels.kernel_sizes import NUM_ROWS
from swiftbatch.worker.model.model_files import ModelFiles
from tests.worker.exactness.gpu_doctor.small_parts import a_little_off, by_place, row_by_row, small_parts

pytestmark = pytest.mark.long


def test_every_shape_is_tried_with_every_kernel(embedded_files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LINEAR_KERNELS, "cublas", row_by_row)
    finding = check_gemms(small_parts(embedded_files, linear="cublas"))
    assert (finding.passed, finding.linear, finding.words) == (True, "cublas", "products by cublas")
    names = ["q, k, v", "output", "gate, up", "down", "head"]
    assert [(row["kernel"], row["weights"]) for row in finding.rows] == [
        (kernel, name) for kernel in LINEAR_KERNELS for name in names
    ]
    assert {row["tried"] for row in finding.rows} == {NUM_ROWS}
    assert all(float(row["ms"]) > 0 and float(row["GB/s"]) > 0 for row in finding.rows)


def test_a_kernel_whose_bits_depend_on_the_place_is_left_out(
    embedded_files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LINEAR_KERNELS, "cublas", by_place)
    monkeypatch.setitem(LINEAR_KERNELS, "triton", row_by_row)
    finding = check_gemms(small_parts(embedded_files))
    assert (finding.passed, finding.linear) == (True, "triton")
    assert "not by cublas" in finding.words
    assert {row["differing"] for row in finding.rows if row["kernel"] == "cublas"} == {NUM_ROWS // 2}


def test_the_kernel_that_was_asked_for_is_taken_where_both_are_good(
    embedded_files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LINEAR_KERNELS, "cublas", row_by_row)
    monkeypatch.setitem(LINEAR_KERNELS, "triton", row_by_row)
    assert check_gemms(small_parts(embedded_files, linear="triton")).linear == "triton"
    assert check_gemms(small_parts(embedded_files, linear="cublas")).linear == "cublas"


def test_where_no_kernel_is_left_the_check_fails(embedded_files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LINEAR_KERNELS, "cublas", by_place)
    monkeypatch.setitem(LINEAR_KERNELS, "triton", a_little_off)
    finding = check_gemms(small_parts(embedded_files))
    assert (finding.passed, finding.linear) == (False, None)
    off = [row for row in finding.rows if row["kernel"] == "triton"]
    assert all(row["differing"] == 0 for row in off)
    assert all(float(row["error"]) > 1 for row in off)
