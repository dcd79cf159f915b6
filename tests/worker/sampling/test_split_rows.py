"""Rows of several sequences are returned separately or together, without copies."""

from __future__ import annotations

import pytest
import torch

from swiftbatch.worker.sampling.batch_sampler import SplitRows, together

ROWS = torch.arange(12.0).view(6, 2)


def test_each_sequence_has_its_rows_and_a_part_of_them_has_its_own() -> None:
    split = SplitRows(ROWS, [1, 3, 2])
    assert [each.tolist() for each in split] == [each.tolist() for each in ROWS.split([1, 3, 2])]
    assert split[-1].tolist() == ROWS[4:].tolist()
    first, rest = split[:1], split[1:]
    assert (len(first), len(rest), len(split[3:])) == (1, 2, 0)
    assert rest[0].tolist() == ROWS[1:4].tolist()
    assert rest.together.data_ptr() == ROWS[1:].data_ptr()
    with pytest.raises(IndexError):
        rest[2]
    with pytest.raises(ValueError, match="found every 2th sequence"):
        split[::2]


def test_rows_side_by_side_are_not_copied_and_others_are_joined() -> None:
    split = SplitRows(ROWS, [4, 2])
    assert together(split).data_ptr() == ROWS.data_ptr()
    assert torch.equal(together(list(split)), ROWS)
