"""Checks of whole forwards fail on broken subjects."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from swiftbatch.worker.exactness.gpu_doctor import forward_checks
from swiftbatch.worker.exactness.gpu_doctor.forward_checks import (
    check_replay,
    check_rows,
    check_second_process,
    check_transformers,
)
from swiftbatch.worker.exactness.gpu_doctor.model_under_test import Parts
from swiftbatch.worker.kernels.cuda.cuda_graph import Repeated, Work
from swiftbatch.worker.kernels.cuda.gemm import LINEAR_KERNELS
from swiftbatch.worker.kernels.gpu_kernel_choice import CudaKernels
from swiftbatch.worker.model.model_files import ModelFiles, locate_model
from tests.worker.exactness.gpu_doctor.small_parts import SMALL, row_by_row, small_parts

pytestmark = pytest.mark.long


def test_rows_of_trees_are_those_of_plain_decoding(embedded_files: ModelFiles) -> None:
    finding = check_rows(small_parts(embedded_files))
    assert finding.passed, finding.words
    assert int(finding.rows[0]["tried"]) >= 3


def test_rows_whose_bits_depend_on_their_place_are_found(
    embedded_files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_odd_place(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        row_by_row(rows, weight, bias, out)
        out[1::2] = torch.nextafter(out[1::2], out[1::2] + 1)

    monkeypatch.setitem(LINEAR_KERNELS, "triton", by_odd_place)
    finding = check_rows(small_parts(embedded_files))
    assert not finding.passed
    assert int(finding.rows[0]["differing"]) > 0


def test_a_graph_gives_the_bits_of_its_kernels(embedded_files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LINEAR_KERNELS, "triton", row_by_row)
    finding = check_replay(small_parts(embedded_files))
    assert finding.passed
    assert len({row["sha256"] for row in finding.rows}) == 1


def test_a_graph_that_forgets_its_newest_table_is_found(
    embedded_files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LINEAR_KERNELS, "triton", row_by_row)
    parts = small_parts(embedded_files)
    parts.capture = Stale
    assert not check_replay(parts).passed


class Stale(Repeated):
    """A graph that works only at every second replay."""

    def __init__(self, work: Work, device: torch.device) -> None:
        super().__init__(work)
        self._work, self._num_replays = work, 0
        self.replay = self._sometimes

    def _sometimes(self) -> None:
        self._num_replays += 1
        if self._num_replays % 2:
            self._work()


def test_a_process_that_computes_other_bits_is_found(
    embedded_files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LINEAR_KERNELS, "triton", row_by_row)
    monkeypatch.setattr(forward_checks, "digest_elsewhere", lambda parts: "0" * 64)
    finding = check_second_process(small_parts(embedded_files))
    assert (finding.passed, finding.words) == (False, "another process computes other bits")


def of_folder(model: Path) -> Parts:
    parts = Parts.of(locate_model(str(model)), "float32", torch.device("cpu"), CudaKernels(linear="triton"))
    parts.extent = SMALL
    return parts


def test_another_process_loads_the_model_and_computes_the_same_bits(
    one_layer_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import tests.worker.interpreter\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.getcwd()}")  # so that it has the same interpreter
    finding = check_second_process(of_folder(one_layer_model))
    assert (finding.passed, finding.words) == (True, "another process computes the same bits")


def test_the_forward_is_that_of_transformers(one_layer_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = check_transformers(of_folder(one_layer_model))
    assert finding.passed, finding.words
    assert finding.rows[0]["rows"] == SMALL.num_compared

    def another(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        row_by_row(rows, weight.flip(0), bias, out)

    monkeypatch.setitem(LINEAR_KERNELS, "triton", another)
    assert not check_transformers(of_folder(one_layer_model)).passed
