"""Attention is compared with each row alone and with float64; a row that sees its neighbours is found out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.worker.exactness.first_run.small_parts import SMALL, small_parts
from tests.worker.kernels.kernel_parts import BF16, FLOAT32
from worker.exactness.first_run import one_layer
from worker.exactness.first_run.attention import TIMED_ROWS, check_attention, check_attention_speed
from worker.kernels.cuda.attention import attend
from worker.model.files import ModelFiles


@pytest.mark.parametrize("dtype", [FLOAT32, BF16], ids=str)
def test_rows_at_all_lengths_are_their_own(embedded_files: ModelFiles, dtype: torch.dtype) -> None:
    finding = check_attention(small_parts(embedded_files, dtype))
    assert finding.passed, finding
    assert [row["length"] for row in finding.rows] == list(SMALL.lengths)
    assert all(row["differing"] == 0 and int(row["tried"]) >= 4 for row in finding.rows)


def broken(spoil: Any) -> Any:
    def attended(*args: Any) -> None:
        attend(*args)
        spoil(args[4], args[6])  # the table, and what was mixed

    return attended


def test_a_row_that_its_neighbours_change_is_found(embedded_files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(table: Any, mixed: torch.Tensor) -> None:
        if int((table.rows[:, 2] > 0).sum()) > 2:
            mixed[1] = torch.nextafter(mixed[1], mixed[1] + 1)

    monkeypatch.setattr(one_layer, "attend", broken(spoil))
    finding = check_attention(small_parts(embedded_files))
    assert not finding.passed
    assert "rows differ in any bit from the row alone" in finding.words


def test_wrong_sums_are_found_where_all_rows_have_them(
    embedded_files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_layer, "attend", broken(lambda table, mixed: mixed.mul_(1.0001)))
    finding = check_attention(small_parts(embedded_files))
    assert not finding.passed
    assert {row["differing"] for row in finding.rows} == {0}


def test_reading_is_timed_at_the_greatest_length(embedded_files: ModelFiles) -> None:
    finding = check_attention_speed(small_parts(embedded_files))
    assert finding.passed
    assert [(row["slots"], row["length"]) for row in finding.rows] == [(1, 300)] * 3 + [(2, 300)] * 3
    assert len(finding.rows) == len(TIMED_ROWS) * len(SMALL.slot_counts)
    assert all(float(row["GB/s"]) > 0 for row in finding.rows)
