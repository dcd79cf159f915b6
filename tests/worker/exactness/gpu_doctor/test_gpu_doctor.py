from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from swiftbatch.worker.exactness.gpu_doctor import forward_checks, machine_checks
from swiftbatch.worker.exactness.gpu_doctor.findings import Finding
from swiftbatch.worker.exactness.gpu_doctor.gpu_doctor import CHECKS, NEVER_PROVED, FirstRun, run_checks, verdicts
from swiftbatch.worker.exactness.gpu_doctor.machine_checks import check_machine, read_bandwidth
from swiftbatch.worker.exactness.gpu_doctor.model_under_test import Extent, Parts
from swiftbatch.worker.kernels.cuda.gemm import LINEAR_KERNELS
from swiftbatch.worker.kernels.gpu_kernel_choice import CudaKernels
from swiftbatch.worker.model.model_files import ModelFiles, locate_model
from tests.worker.exactness.gpu_doctor.small_parts import SMALL, by_place, row_by_row, small_parts

NAMES = [
    "machine", "products", "packed products", "attention", "attention speed", "noise", "rows", "replay", "transformers",
    "second process",
]  # fmt: skip


def passing(name: str) -> Finding:
    return Finding(passed=True, words=f"{name} is fine", rows=[{"what": name, "ms": 1.5}])


def test_checks_come_in_the_order_in_which_they_rest_on_each_other(embedded_files: ModelFiles) -> None:
    assert [check.name for check in CHECKS] == NAMES
    checks = [dataclasses.replace(check, run=lambda parts, name=check.name: passing(name)) for check in CHECKS]
    pages: list[str] = []
    found = run_checks(small_parts(embedded_files, linear="cublas"), pages.append, checks)
    assert [page.partition(":")[0] for page in pages] == NAMES
    assert "rows is fine" in pages[6]
    assert (found.verdict, found.failed, found.unproved) == ("exact", None, list(NEVER_PROVED))
    assert found.page().startswith("exact: all 10 checks passed, with prefixes by triton and products by cublas\n")
    assert FirstRun.model_validate_json(found.model_dump_json()) == found


def test_nothing_runs_behind_a_failure_and_all_of_it_is_told_as_unproved(embedded_files: ModelFiles) -> None:
    failing = Finding(passed=False, words="3 of 9 rows differ", rows=[])
    checks = [
        dataclasses.replace(CHECKS[0], run=lambda parts: passing("machine")),
        dataclasses.replace(CHECKS[1], run=lambda parts: failing),
        *CHECKS[2:],
    ]
    pages: list[str] = []
    found = run_checks(small_parts(embedded_files), pages.append, checks)
    assert len(pages) == len(found.results) == 2
    assert pages[1].startswith("products: FAILED")
    assert found.verdict == "exact up to ties"
    assert found.page().startswith("STOPPED at products: 3 of 9 rows differ\n")
    assert found.unproved[0] == CHECKS[1].proves
    assert [each.removesuffix(" (not reached)") for each in found.unproved[1:9]] == [c.proves for c in CHECKS[2:]]


def test_the_kernel_that_was_found_good_is_taken_from_then_on(
    embedded_files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LINEAR_KERNELS, "cublas", by_place)
    monkeypatch.setitem(LINEAR_KERNELS, "triton", row_by_row)
    parts = small_parts(embedded_files, linear="cublas")
    seen: list[str] = []

    def see(parts: Parts) -> Finding:
        seen.append(parts.kernels.linear)
        return passing("it")

    found = run_checks(parts, checks=[CHECKS[1], dataclasses.replace(CHECKS[2], run=see)])
    assert (seen, found.linear) == (["triton"], "triton")
    assert (found.failed, found.verdict) == (None, "exact up to ties")  # workers do not choose it by themselves
    assert "; those by cublas failed: use --linear triton, which is exact\n" in found.page()
    assert verdicts(found) == [
        (CudaKernels(linear="cublas"), "exact up to ties"), (CudaKernels(linear="triton"), "exact"),
    ]  # fmt: skip


def test_a_verdict_is_on_the_rows_that_were_tried(embedded_files: ModelFiles) -> None:
    parts = small_parts(embedded_files, linear="cublas").with_rows(256)
    checks = [dataclasses.replace(CHECKS[0], run=lambda parts: passing("machine"))]
    found = run_checks(parts, checks=checks)
    assert {kernels.num_rows for kernels, _ in verdicts(found)} == {256}
    assert found.page().splitlines()[1].endswith(", 256 rows")


def test_the_machine_is_told_with_what_it_reads(embedded_files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = check_machine(small_parts(embedded_files))
    assert finding.passed
    names = [row["what"] for row in finding.rows]
    assert names == ["python", "torch", "triton", "transformers", "device", "read bandwidth"]
    monkeypatch.setattr(machine_checks, "capability_of", lambda device: (7, 5))
    old = check_machine(small_parts(embedded_files))
    assert (old.passed, old.words) == (False, "compute capability 7.5, expected 8.0 or higher")


def test_all_bytes_are_read(embedded_files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[torch.Tensor] = []

    def see(numbers: torch.Tensor, sums: torch.Tensor) -> None:
        numbers += 1
        machine_read(numbers, sums)
        read.append(sums)

    machine_read = machine_checks.read_all
    monkeypatch.setattr(machine_checks, "read_all", see)
    parts = small_parts(embedded_files)
    assert read_bandwidth(parts) > 0
    last = read[-1]
    assert int(last.sum()) == len(read) * SMALL.read_bytes // 4


def test_where_the_weights_fit_but_once_transformers_are_told_as_unproved(
    embedded_files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = small_parts(embedded_files)
    parts.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    finding = forward_checks.check_transformers(parts)
    assert finding.passed
    assert finding.unproved is not None
    assert "the weights need" in finding.unproved


def test_a_gpu_is_tried_as_the_plan_says() -> None:
    extent = Extent()
    assert (extent.num_tries, extent.num_rows, extent.lengths[-1]) == (20, 10_000, 102_400)
    assert (min(extent.row_counts), max(extent.row_counts), max(extent.slot_counts)) == (1, 64, 4)


@pytest.mark.slow
def test_the_whole_list_passes_in_the_interpreter(one_layer_model: Path) -> None:
    parts = Parts.of(locate_model(str(one_layer_model)), "float32", torch.device("cpu"))
    parts.extent = dataclasses.replace(SMALL, num_tries=2, num_rows=20, most_nodes=6, work_lengths=(3, 70))
    pages: list[str] = []
    found = run_checks(parts, pages.append)
    print("\n".join([*pages, found.page()]))
    assert found.failed is None
    assert [result.name for result in found.results] == NAMES


def test_products_are_tried_with_the_settings_that_workers_run_with(
    one_layer_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    products = SimpleNamespace(allow_bf16_reduced_precision_reduction=True)
    monkeypatch.setattr(torch.backends.cuda, "matmul", products)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # the caller's environment must not affect a run's bits
    chosen: list[str] = []
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", chosen.append)
    Parts.of(locate_model(str(one_layer_model)), "bfloat16", torch.device("cuda"))
    assert products.allow_bf16_reduced_precision_reduction is False
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert chosen == ["cublas"]
