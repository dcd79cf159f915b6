from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from swiftbatch.worker.exactness.gpu_doctor.attention_check import TIMED_ROWS, check_attention, check_attention_speed
from swiftbatch.worker.exactness.gpu_doctor.model_under_test import Parts
from swiftbatch.worker.kernels.cuda.attention_backends import TritonAttention
from swiftbatch.worker.kernels.gpu_kernel_choice import CudaKernels
from swiftbatch.worker.model.model_files import ModelFiles
from tests.worker.exactness.gpu_doctor.small_parts import SMALL, one_layer, small_parts
from tests.worker.kernels.cuda import flash_stub
from tests.worker.kernels.kernel_parts import BF16, FLOAT32, INDEXED, LATENTS, Shape

pytestmark = pytest.mark.long


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [FLOAT32, BF16], ids=str)
def test_rows_at_all_lengths_are_their_own(embedded_files: ModelFiles, dtype: torch.dtype) -> None:
    finding = check_attention(small_parts(embedded_files, dtype))
    assert finding.passed, finding
    assert [row["length"] for row in finding.rows] == list(SMALL.lengths)
    assert all(row["differing"] == 0 and int(row["tried"]) >= 4 for row in finding.rows)


@pytest.mark.parametrize("shape", [LATENTS[1], INDEXED[1]], ids=["latent", "beside index keys"])
def test_rows_over_latent_vectors_are_their_own(shape: Shape, embedded_files: ModelFiles) -> None:
    parts, weights = small_parts(embedded_files), one_layer(shape)
    parts.load = lambda: weights
    finding = check_attention(parts)
    assert finding.passed, finding
    assert all(row["differing"] == 0 and int(row["tried"]) >= 4 for row in finding.rows)


@pytest.fixture
def flash_parts(embedded_files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> Parts:
    flash_stub.install(monkeypatch)
    parts = small_parts(embedded_files, BF16)
    parts.kernels = CudaKernels(attention="flash")
    return parts


def test_rows_are_their_own_behind_flash_attn_s_prefixes(flash_parts: Parts) -> None:
    finding = check_attention(flash_parts)
    assert finding.passed, finding
    assert all(row["differing"] == 0 and int(row["tried"]) >= 4 for row in finding.rows)


def test_a_flash_attn_that_counts_in_base_2_is_found(flash_parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_base_2(*args: Any, **kwargs: Any) -> Any:
        output, lse = flash_stub.flash_attn_with_kvcache(*args, **kwargs)
        return output, lse * 1.44

    monkeypatch.setattr(sys.modules["flash_attn"], "flash_attn_with_kvcache", in_base_2)
    assert not check_attention(flash_parts).passed


def broken(spoil: Any) -> Any:
    attend = TritonAttention.attend

    def attended(attention: TritonAttention, *args: Any) -> None:
        attend(attention, *args)
        spoil(*args[-2:])  # the table, and the mixed values

    return attended


def test_a_row_that_its_neighbours_change_is_found(embedded_files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(table: Any, mixed: torch.Tensor) -> None:
        if int((table.rows[:, 2] > 0).sum()) > 2:
            mixed[1] = torch.nextafter(mixed[1], mixed[1] + 1)

    monkeypatch.setattr(TritonAttention, "attend", broken(spoil))
    finding = check_attention(small_parts(embedded_files))
    assert not finding.passed
    assert "rows differ in any bit from the row alone" in finding.words


def test_wrong_sums_are_found_where_all_rows_have_them(
    embedded_files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TritonAttention, "attend", broken(lambda table, mixed: mixed.mul_(1.0001)))
    finding = check_attention(small_parts(embedded_files))
    assert not finding.passed
    assert {row["differing"] for row in finding.rows} == {0}


def test_reading_is_timed_at_the_greatest_length(embedded_files: ModelFiles) -> None:
    finding = check_attention_speed(small_parts(embedded_files))
    assert finding.passed
    assert [(row["slots"], row["length"]) for row in finding.rows[:6]] == [(1, 300)] * 3 + [(2, 300)] * 3
    assert len(finding.rows) == len(TIMED_ROWS) * len(SMALL.slot_counts) + len(SMALL.many_slots)
    assert [(row["slots"], row["length"]) for row in finding.rows[6:]] == [(3, 140), (70, 140)]
    assert all(float(row["GB/s"]) > 0 for row in finding.rows)


def test_flash_attn_is_timed_beside_triton(flash_parts: Parts) -> None:
    finding = check_attention_speed(flash_parts)
    num_timed = len(TIMED_ROWS) * len(SMALL.slot_counts) + len(SMALL.many_slots)
    assert [row["attention"] for row in finding.rows] == ["flash"] * num_timed + ["triton"] * num_timed
    assert all(finding.words.count(f"{name} reads keys and values at up to") == 1 for name in ("flash", "triton"))
